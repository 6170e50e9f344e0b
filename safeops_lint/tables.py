"""Names of torch's functions, methods and dtypes, by what they do."""


def words(text):
    return frozenset(text.split())


# Calls of torch.* that give no tensor. (Modules like torch.cuda or torch.distributed are not looked into.)
NO_TENSOR = words("""is_tensor is_storage is_complex is_floating_point is_nonzero is_grad_enabled is_autocast_enabled
    device dtype Size Generator Stream finfo iinfo numel get_default_dtype set_default_dtype manual_seed seed save load
    compile no_grad enable_grad inference_mode set_grad_enabled typename set_printoptions set_num_threads
    get_num_threads result_type promote_types can_cast broadcast_shapes allclose equal device is_same_size get_rng_state
    set_rng_state autocast is_inference_mode_enabled are_deterministic_algorithms_enabled use_deterministic_algorithms
    layout Event Tag Tensor split chunk unbind topk sort max_pool2d_with_indices svd eigh eig qr lu slogdet meshgrid
    unique broadcast_tensors aminmax frexp kthvalue mode histogram lobpcg tensor_split vsplit hsplit dsplit where_ Event
    jit""")
# Methods of a tensor that do not return a tensor.
NO_TENSOR_METHODS = words("""item tolist numpy size dim ndimension numel nelement stride storage data_ptr element_size
    get_device is_contiguous is_floating_point is_complex is_shared backward register_hook equal allclose type split
    chunk unbind topk sort keys values items is_set_to is_pinned storage_offset names copy shape svd eigh qr slogdet
    unique requires_grad retain_grad is_signed is_inference __len__ aminmax kthvalue mode frexp""")
# (split, topk, ... return tuples of tensors. For max and min with a dim, see PAIRS.) Attributes that are no tensors:
NO_TENSOR_ATTRIBUTES = words("""shape dtype device ndim requires_grad is_cuda is_leaf layout names grad_fn nbytes
    itemsize is_sparse is_nested is_quantized is_meta""")
# Methods that show that a name is a tensor if they are called on it (numpy, str and dict have none of them).
TENSOR_METHODS = words("""detach unsqueeze view size float double half cuda cpu requires_grad_ new_zeros new_ones
    new_tensor new_full masked_fill masked_fill_ masked_select masked_scatter type_as contiguous permute expand
    expand_as numel dim softmax log_softmax sigmoid logsumexp gather scatter scatter_ scatter_add_ index_select isnan
    isinf isfinite bmm mm clamp clamp_min clamp_max clamp_ norm exp log sqrt rsqrt pow abs square unbind chunk backward
    unfold bool long addcdiv_ addcmul_""")
# Methods of tensors and of arrays. If one is called on an argument of a loss, that argument is a tensor.
ARRAY_METHODS = words("mean sum min max amin amax std var prod mT t flatten reshape argmax cumsum any all")
TENSOR_ATTRIBUTES = {"is_cuda", "requires_grad", "grad_fn", "is_leaf"}

SHAPING = words("""view reshape unsqueeze squeeze expand expand_as permute transpose t contiguous flatten unflatten
    repeat movedim swapaxes broadcast_to detach clone cuda cpu to index_select gather flip roll narrow select diagonal
    view_as reshape_as requires_grad_ repeat_interleave tile data squeeze_ unsqueeze_ atleast_1d atleast_2d ravel""")
COMPARISONS = words("""isnan isinf isfinite isposinf isneginf eq ne lt gt le ge logical_and logical_or logical_not
    logical_xor bool isclose isin isreal""")
CONSTRUCTORS = words("""zeros ones full empty arange linspace logspace eye tensor as_tensor from_numpy zeros_like
    ones_like full_like empty_like rand randn randint randperm rand_like randn_like new_zeros new_ones new_full
    new_tensor new_empty tril_indices triu_indices hann_window hamming_window kaiser_window scalar_tensor normal
    bernoulli multinomial one_hot empty_strided Tensor asarray""")
# Results have torch's default dtype, fp32, if no dtype is given.
SINGLE = words("zeros ones empty rand randn linspace logspace eye hann_window hamming_window kaiser_window")
# Results are not 0 for inputs that occur in practice.
POSITIVE = words("cholesky exp i0e softplus cosh sigmoid where masked_fill nan_to_num erfc logaddexp finfo")
# Results are kept away from 0 if the operands are.
KEEPS_POSITIVE = SHAPING | words("""sum mean prod amax amin max min sqrt abs square cumsum float double half cat stack
    norm log1p rsqrt reciprocal logsumexp type type_as nansum pow masked_select""")
NO_HALF = words("""svd svdvals svd_lowrank pca_lowrank eig eigh eigvals eigvalsh qr slogdet lstsq matrix_rank
    matrix_power lu_factor solve solve_triangular cholesky cholesky_solve cholesky_inverse inv inverse pinv pinverse det
    logdet cond quantile nanquantile histc igamma igammac gammainc gammaincc ndtri log_ndtr zeta""")
# Results are fp32 or wider: NO_HALF has no kernels for half, and complex tensors are hardly ever half.
WIDENING = NO_HALF | words("""float double stft istft fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn
    irfftn complex polar view_as_complex""")
# Autocast computes these in half, whatever the operands' dtypes.
HALVED = words("""matmul mm mv bmm addmm addmv addbmm baddbmm addr chain_matmul multi_dot einsum linear bilinear
    tensordot conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu
    scaled_dot_product_attention""")
# Autocast on a GPU computes these in fp32 (a model that is cast to half does not).
RAISED = words("""acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    group_norm rms_norm norm normalize cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss mse_loss margin_ranking_loss multilabel_margin_loss
    soft_margin_loss renorm triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits cross_entropy dist
    pdist cdist logsumexp prod softmax log_softmax cumprod cumsum sum""")
WIDE_DTYPES = {"torch.float32", "torch.float64", "torch.float", "torch.double"}
HALF_DTYPES = {"torch.float16", "torch.half", "torch.bfloat16"}
INTEGER = words("argsort argmax argmin long int bincount count_nonzero nonzero argwhere searchsorted bucketize one_hot")
# These return a pair (values, indices) if a dim is given; sort, topk and a few more always do.
PAIRS = {"max", "min", "median", "mode", "cummax", "cummin", "sort", "topk", "kthvalue"}
# Names of batches, or of a model's outputs, which a training step or a loss unpacks or indexes.
BATCHES = words("batch data sample samples example examples inputs outputs output out item preds predictions")
# Methods that only tensors have, not arrays or other objects.
SURE_METHODS = words("""unsqueeze masked_fill masked_fill_ masked_select type_as log_softmax logsumexp softmax sigmoid
    isnan isfinite isinf clamp clamp_ clamp_min clamp_max index_select bmm new_zeros requires_grad_ sqrt rsqrt exp pow
    square log abs log1p tanh detach gather permute expand expand_as contiguous unbind""")
# Operations whose result is a weight, not a mask, even if its name says mask.
SOFT = {"sigmoid", "softmax", "log_softmax", "tanh", "logsigmoid", "rand", "rand_like", "randn", "randn_like", "exp"}
DETACHES = {"detach", "data"}
# Operations whose result is floating for any input.
FLOATING = RAISED - words("cumprod cumsum pow prod renorm sum") | words("div mean sigmoid sqrt std tanh var")
KEEPS_INTEGER = SHAPING | words("add sub mul neg abs index sum cumsum clamp remainder floor_divide amax amin where")
# Operations whose backward needs their result: changing the result in place breaks backward.
SAVES_RESULT = words("""exp exp2 expm1 sqrt rsqrt reciprocal sigmoid tanh softmax log_softmax relu norm logsumexp selu
    elu_ tan std cumprod celu hardsigmoid_ softplus_""")
REDUCTIONS = words("sum mean amax amin max min prod nansum nanmean std var norm logsumexp median count_nonzero")

"""linear_cross_entropy: a linear layer and the cross entropy of its logits, in chunks (but see _whole_logits.py)."""

import torch

from safeops.core import check
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw
from safeops.core.loss_reduction import as_divisor, reduce, reduce_sum
from safeops.core.matmul import matmul
from safeops.core.route import PLAIN
from safeops.core.sums import total
from safeops.core.symbolic import symbolic
from safeops.ops.classification._classification import (
    ARGUMENTS,
    class_dim,
    normalized_weight,
    refuse_missing_class,
    rows_of,
    validate_index,
    validate_numbers,
    validate_reduction,
    weighed,
    without_weight_0,
)
from safeops.ops.classification._logits import as_floats
from safeops.ops.classification.cross_entropy import CrossEntropy, count_row_stats
from safeops.ops.classification.cross_entropy import define as define_cross_entropy
from safeops.ops.linear import _rows
from safeops.ops.linear._layer import (
    LOGITS_DTYPE,
    in_one_dtype,
    validate_classes,
    validate_layer,
    validate_logits_dtype,
    validate_per_class,
    wide_logits,
)
from safeops.ops.linear._whole_logits import is_whole, loss_of_logits

NAME, MEMORY = _rows.NAME, ("auto", "low")

# ---- definition


def define(
    input, linear_weight, target, linear_bias=None, weight=None, mask=None, row_weight=None, divisor=None,
    ignore_index=-100, label_smoothing=0.0, z_loss=0.0, temperature=1.0, softcap=0.0, wide=False, mean=False, at_once=0,
    *needs,
):  # fmt: skip
    """Returns (loss, keep, weights that a mean divides by), each of the rows' shape; no weights: an empty tensor.

    Logits are in fp32 here, also if not wide.
    needs: bools for input, weight and bias: True if forward computes the gradient, too. If any is True, loss is the
    rows' sum, 0-dim, in fp64.
    """
    compute = compute_dtype(input.dtype)
    _, keep, _ = rows_of(linear_weight.shape[0], target, weight, mask, ignore_index, compute)
    x = torch.where(keep.unsqueeze(-1), input, 0).to(compute)  # select before arithmetic: NaN * 0 is NaN
    logits = matmul(x, linear_weight.to(compute))
    logits = logits if linear_bias is None else logits + linear_bias.to(compute)
    logits = logits.movedim(-1, class_dim(logits))
    options = ignore_index, label_smoothing, z_loss, temperature, softcap
    loss, keep, weights = define_cross_entropy(logits, target, weight, keep, *options)
    if row_weight is not None:
        loss, weights = weighed(loss, keep, None if weight is None else weights, row_weight)
    return (total(loss, keep, dtype=torch.float64) if any(needs) else loss), keep, weights


# ---- op


def _fake(
    input, linear_weight, target, linear_bias, weight, mask, row_weight, divisor, ignore_index, label_smoothing,
    *options,
):  # fmt: skip
    *_, at_once, need_input, need_weight, need_bias = options
    needs = need_input, need_weight, need_bias
    rows, dtype, with_loss = input.shape[:1], compute_dtype(input.dtype), any(needs)
    wide = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    scalar = input.new_empty((), dtype=torch.float64)
    factor = row_weight if with_loss else None
    reduced = wide if factor is None else compute_dtype(wide, factor.dtype)
    return (
        scalar if with_loss else input.new_empty(rows, dtype=dtype),
        input.new_empty(rows, dtype=torch.bool),
        input.new_empty(0 if weight is None and factor is None else rows, dtype=reduced),
        input.new_empty((count_row_stats(target, weight, label_smoothing), 0 if with_loss else rows[0]), dtype=wide),
        torch.empty_like(scalar) if with_loss else input.new_empty(0, dtype=dtype),
        *_rows.empty_gradients(input, linear_weight, needs, at_once),
    )


_OPTIONS = (
    "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, float temperature=1.0, float softcap=0.0, "
    "bool wide=False, "
)
_NEEDS = "bool need_input=False, bool need_weight=False, bool need_bias=False"
_forward = declare_raw(
    "_linear_cross_entropy",
    "(Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias=None, Tensor? weight=None, "
    f"Tensor? mask=None, Tensor? row_weight=None, Tensor? divisor=None, {_OPTIONS}bool mean=False, SymInt at_once=0, "
    f"{_NEEDS}) -> (Tensor loss, Tensor keep, Tensor weights, Tensor row_stats, Tensor factor, Tensor d_input, "
    "Tensor d_weight, Tensor d_bias)",
    fake=_fake,
    composite=_rows.forward,
)
_backward = declare_raw(
    "_linear_cross_entropy_backward",
    "(Tensor grad, Tensor input, Tensor linear_weight, Tensor target, Tensor row_stats, Tensor? linear_bias=None, "
    f"Tensor? weight=None, Tensor? mask=None, {_OPTIONS}{_NEEDS}) -> (Tensor, Tensor, Tensor)",
    fake=lambda grad, input, linear_weight, *options: tuple(_rows.empty_gradients(input, linear_weight, options[-3:])),
    composite=_rows.backward_of_rows,
)

# ---- record


class LinearCrossEntropy(CrossEntropy):
    """Matrix products of N x D x C: three if forward computes and saves the gradients of the sum, too (_rows.py). Else
    four, or three without the weight's gradient (_chunks.py); two to four numbers per row are saved.

    The raw ops are Python code for every device: the definition would compute all logits at once.
    """

    owner, shards = None, "vocabulary"
    differentiable = ("input", "linear_weight", "linear_bias")
    constant = ("weight",)
    saved = ("row_stats", "factor", "d_input", "d_weight", "d_bias")

    def __init__(self):
        super().__init__(NAME, "LinearCrossEntropyLoss", _forward, _backward, define)
        self.raw, self.cpu = (), True

    def prepare(self, *operands):
        return True, operands

    def validate(self, *operands):
        """Nothing to do: the public function has validated the operands, in the caller's shapes."""

    def validate_options(self, name, reduction, empty, *options):
        *options, memory, logits_dtype = options
        super().validate_options(name, reduction, empty, *options)
        check.choice(name, "memory", memory, MEMORY)
        validate_logits_dtype(name, logits_dtype)

    def gradients(self, grad, needs, operands, results):
        needs = needs[0], needs[1], needs[3]
        of = operands
        if not any(operands[-3:]):
            return self.backward(
                grad, of.input, of.linear_weight, of.target, results.row_stats, of.linear_bias, of.weight, of.mask,
                of.ignore_index, of.label_smoothing, of.z_loss, of.temperature, of.softcap, of.wide, *needs,
            )  # fmt: skip
        _, keep, _ = rows_of(len(of.linear_weight), of.target, of.weight, of.mask, of.ignore_index, torch.float64)
        gradients = results.d_input, results.d_weight, results.d_bias
        return _rows.backward(grad, gradients, results.factor, needs, of.input.dtype, keep)


_linear_cross_entropy = LinearCrossEntropy()
_linear_cross_entropy.example = "torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])"


# ---- public function


@_linear_cross_entropy.public(
    "(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, Tensor? weight=None, "
    'Tensor? mask=None, str reduction="mean", int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, '
    "Tensor? row_weight=None, float temperature=1.0, float? softcap=None, Tensor? denominator=None, "
    'str empty="zero", str memory="auto", ScalarType? logits_dtype=None) -> Tensor',
    arguments=LOGITS_DTYPE
    + ARGUMENTS.replace("(N, d1, ...)", "(...)").replace(" (RuntimeError where the call is compiled)", ""),
)
def linear_cross_entropy(
    input, linear_weight, target, *extra, linear_bias=None, weight=None, mask=None, reduction="mean", ignore_index=-100,
    label_smoothing=0.0, z_loss=0.0, row_weight=None, temperature=1.0, softcap=None, denominator=None, empty="zero",
    memory="auto", logits_dtype=None, **unknown,
):  # fmt: skip
    """`cross_entropy` of the logits input @ linear_weight.T + linear_bias, computed in chunks.

    As `torch.nn.functional.linear_cross_entropy`. Products are in the operands' dtype. Their sums, the softmax, the
    loss and sums over chunks are in fp32. Each gradient is rounded once, at the end.

    The gradients of a mean or sum are computed with the loss and kept for backward. That takes three products, as many
    as a linear layer and its loss.

    On a GPU the logits of 8,192 rows exist at a time, in one buffer (of 4,096 rows without the weight's gradient). A
    linear layer and its loss hold all logits three times.

    With memory="low", and on the CPU, eight million logits exist at a time, or an eighth of all. There the gradient of
    a half weight needs an fp32 buffer, as large as the logits of 2 D rows. If that does not fit into an eighth of the
    logits, with fewer than about 16 D rows, backward computes the logits again, a fourth product.

    With reduction="none", too, backward computes the logits again. Second derivatives, functorch transforms and
    `torch.export` compute all logits at once, in fp32.

    With logits_dtype=torch.float32 half as many logits exist at a time, so as many bytes.

    Infinite logits are as in `cross_entropy`, and a class with a bias of -inf does not exist.

    Chunks: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2025. Gradients with the loss: Hsu et
    al., "Liger Kernel", 2024.

    Args:
        input: (..., D) floating tensor, a vector for each row.
        linear_weight: (C, D) tensor of `input`'s dtype. Under autocast they may differ: both are cast to its dtype.
        target: class indices in [0, C), int64, int32 or uint8, of shape (...). Torch's other forms compute all logits
            at once, in fp32: class probabilities (N, C) or (C,), floating; or a `linear_weight` (C, d1, ..., D) and
            `linear_bias` (C, d1, ...), with a target (N, d1, ...) or probabilities (N, C, d1, ...).
        linear_bias: (C,) tensor of `input`'s dtype.
        label_smoothing: from 0 to 1, the share of the loss that is spread over all classes.
        z_loss: factor of the squared logsumexp, at least 0. With class weights and class indices, its mean is separate
            and without these weights. A `denominator` divides both terms: for exact accumulation, z_loss needs a call
            of its own, without class weights.
        row_weight: floating tensor, broadcastable to the rows' shape. It multiplies each row's loss, and the mean
            divides by its sum (times the class weights). A row of weight 0 is masked out. Differentiable: backward then
            computes the logits again.
        temperature: divides the logits, above 0.
        softcap: above 0: a logit x is read as softcap tanh(x / softcap), before the temperature. None: x as it is.
        memory: "auto", or "low": on a GPU, too, an eighth of the logits exists at a time, or those of 1,024 rows. (The
            amount of free memory changes nothing: equal calls have gradients with equal bits.)
        {arguments}

    Example:
        >>> input, linear_weight = torch.eye(3), torch.tensor([[2.0, 0.0, torch.nan], [0.0, 0.0, torch.nan]])
        >>> input, linear_weight = input[:2, :2], linear_weight[:, :2]
        >>> safeops.linear_cross_entropy(input, linear_weight, torch.tensor([0, -100]))
        tensor(0.1269)
    """
    if extra or unknown:
        refuse(linear_cross_entropy, extra, unknown)
    validate_reduction(NAME, input, reduction, denominator, empty)
    check.choice(NAME, "memory", memory, MEMORY)
    validate_logits_dtype(NAME, logits_dtype)
    if is_whole(input, linear_weight, target):
        return loss_of_logits(
            NAME, input, linear_weight, target, linear_bias, mask, ignore_index, logits_dtype, weight=weight,
            reduction=reduction, label_smoothing=label_smoothing, z_loss=z_loss, row_weight=row_weight,
            temperature=temperature, softcap=softcap, denominator=denominator, empty=empty,
        )  # fmt: skip
    validate_layer(NAME, input, linear_weight, linear_bias)
    validate_per_class(NAME, "weight", weight, linear_weight)
    validate_classes(NAME, input, linear_weight, target, mask)
    check.same_device(NAME, "input", input, weight=weight)
    validate_index(NAME, ignore_index)
    validate_numbers(NAME, label_smoothing, z_loss)
    shape = as_floats(NAME, temperature, softcap)
    wide = wide_logits(NAME, logits_dtype, input, linear_weight, linear_bias)
    rows = target.shape
    if row_weight is not None:
        mask = without_weight_0(NAME, row_weight, mask, input, rows)
        # (cast before it is expanded: the gradient of a row_weight that broadcasts is summed in this dtype)
        row_weight = row_weight.to(compute_dtype(input.dtype, row_weight.dtype)).expand(rows)
    refuse_missing_class(NAME, target, mask, ignore_index, len(linear_weight), "linear_weight", linear_weight.shape)
    input, linear_weight, linear_bias = in_one_dtype(input, linear_weight, linear_bias)
    mask = None if mask is None else mask.expand(rows)
    if check.mesh(input) is None:  # (a DTensor keeps its dims, any of which may be sharded)
        input, target = input.reshape(target.numel(), input.shape[-1]), target.reshape(-1)
        mask, row_weight = (t if t is None else t.reshape(-1) for t in (mask, row_weight))
    own_mean = weight is not None and reduction == "mean" and denominator is None
    if own_mean and (symbolic(z_loss) or z_loss != 0):
        weight = normalized_weight(weight, linear_weight, 0, target, mask, ignore_index, row_weight)
    takes = reduction != "none" and (row_weight is None or type(row_weight) in PLAIN and not row_weight.requires_grad)
    at_once, needs = _rows.gradients_with_loss(input, linear_weight, linear_bias, memory, takes, wide)
    mean, divisor, weight_in_kernel = reduction == "mean", None, None
    if any(needs):
        weight_in_kernel, row_weight = row_weight, None
        if mean and denominator is not None:
            divisor = as_divisor(denominator, input)
    loss, keep, weights = _linear_cross_entropy.call(
        input, linear_weight, target, linear_bias, weight, mask, weight_in_kernel, divisor, ignore_index,
        label_smoothing, z_loss, *shape, wide, mean, at_once, *needs,
    )  # fmt: skip
    weights = None if weight is None and weight_in_kernel is None else weights
    if row_weight is not None:
        loss, weights = weighed(loss, keep, weights, row_weight)
    dtype = compute_dtype(input.dtype)
    if reduction == "none":
        return loss.reshape(rows).to(dtype)
    if any(needs):
        return reduce_sum(NAME, loss, keep, weights, reduction, denominator, empty, dtype)
    return reduce(NAME, loss, keep, weights, reduction, denominator, empty).to(dtype)

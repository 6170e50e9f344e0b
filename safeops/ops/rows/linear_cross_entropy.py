"""linear_cross_entropy: a linear layer and the cross entropy of its output, which never exists as a whole."""

import torch

from safeops.core import check
from safeops.core.dtypes import compute_dtype
from safeops.core.library import declare_raw
from safeops.core.loss_reduction import reduce, reduce_sum
from safeops.core.sums import total
from safeops.ops.rows import _linear_chunks, _linear_rows
from safeops.ops.rows._classification import (
    ARGUMENTS,
    class_dim,
    refuse_missing_class,
    rows_of,
    validate_index,
    validate_numbers,
    validate_reduction,
)
from safeops.ops.rows._linear_layer import in_one_dtype, validate_classes, validate_layer, validate_per_class
from safeops.ops.rows._matmul import matmul
from safeops.ops.rows.cross_entropy import CrossEntropy
from safeops.ops.rows.cross_entropy import define as define_cross_entropy

NAME = _linear_chunks.NAME

# ---- definition


def define(
    input, linear_weight, target, linear_bias=None, weight=None, mask=None, ignore_index=-100, label_smoothing=0.0,
    z_loss=0.0, *needs,
):  # fmt: skip
    """(loss, keep, weight that a mean divides by), each of the rows' shape; without such weights the last is empty.

    needs: which gradients the kernel makes with the loss. If any, the losses are summed, in fp64.
    """
    compute = compute_dtype(input.dtype)
    _, keep, _ = rows_of(linear_weight.shape[0], target, weight, mask, ignore_index, compute)
    x = torch.where(keep.unsqueeze(-1), input, 0).to(compute)  # select before arithmetic
    logits = matmul(x, linear_weight.to(compute))
    logits = logits if linear_bias is None else logits + linear_bias.to(compute)
    logits = logits.movedim(-1, class_dim(logits))
    loss, *rest = define_cross_entropy(logits, target, weight, keep, ignore_index, label_smoothing, z_loss)
    return (total(loss, keep, dtype=torch.float64) if any(needs) else loss), *rest


# ---- op


def _fake(input, linear_weight, target, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss, *needs):
    rows, dtype = input.shape[:1], compute_dtype(input.dtype)
    wide = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    return (
        input.new_empty((), dtype=torch.float64) if any(needs) else input.new_empty(rows, dtype=dtype),
        input.new_empty(rows, dtype=torch.bool),
        input.new_empty(0, dtype=dtype) if weight is None else input.new_empty(rows, dtype=wide),
        input.new_empty(0 if any(needs) else rows, dtype=torch.float64),
        *_linear_rows.empty_gradients(input, linear_weight, needs, dtype),
    )


def _fake_backward(grad, input, linear_weight, *options):
    *_, need_input, need_weight, need_bias = options
    needs = need_input, need_weight, need_bias
    return tuple(_linear_rows.empty_gradients(input, linear_weight, needs, input.dtype))


def _compute(input, linear_weight, *options):
    *options, need_input, need_weight, need_bias = options
    needs = need_input, need_weight, need_bias
    if any(needs):
        return _linear_rows.forward(input, linear_weight, *options, *needs)
    gradients = _linear_rows.empty_gradients(input, linear_weight, needs, compute_dtype(input.dtype))
    return *_linear_chunks.forward(input, linear_weight, *options), *gradients


_OPERANDS = "Tensor? linear_bias=None, Tensor? weight=None, Tensor? mask=None, int ignore_index=-100, " + (
    "float label_smoothing=0.0, float z_loss=0.0, bool need_input=False, bool need_weight=False, bool need_bias=False"
)
_forward = declare_raw(
    "_linear_cross_entropy",
    f"(Tensor input, Tensor linear_weight, Tensor target, {_OPERANDS}) -> "
    "(Tensor loss, Tensor keep, Tensor weights, Tensor logsumexp, Tensor d_input, Tensor d_weight, Tensor d_bias)",
    fake=_fake,
    composite=_compute,
)
_backward = declare_raw(
    "_linear_cross_entropy_backward",
    f"(Tensor grad, Tensor input, Tensor linear_weight, Tensor target, Tensor log_sum, {_OPERANDS}) -> "
    "(Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    composite=_linear_chunks.backward,
)

# ---- record


class LinearCrossEntropy(CrossEntropy):
    """Products of N x D x C: three where the gradients of a sum are made with the loss (`_linear_rows`), which saves
    them; else four, three without the weight's gradient (`_linear_chunks`), which saves the logsumexp of each row.

    The raw ops are in Python, and for every device: the definition, which makes all logits at once, is no substitute.
    """

    owner, shards = None, "vocabulary"
    differentiable = (0, 1, 3)
    constant = slice(4, 5)  # the class weights
    saved = slice(3, None)

    def __init__(self):
        super().__init__(NAME, "LinearCrossEntropyLoss", _forward, _backward, define)
        self.raw, self.cpu = (), True

    def prepare(self, *operands):
        return True, operands

    def validate(self, *operands):
        """The public function has, of operands with their own shapes."""

    def gradients(self, grad, needs, operands, results):
        input, linear_weight, target, linear_bias, weight, mask, ignore_index, *options = operands
        label_smoothing, z_loss, *with_loss = options
        need_input, need_weight, _, need_bias, *_ = needs
        if not any(with_loss):
            return self.backward(
                grad, input, linear_weight, target, results.logsumexp, linear_bias, weight, mask, ignore_index,
                label_smoothing, z_loss, need_input, need_weight, need_bias,
            )  # fmt: skip
        _, keep, _ = rows_of(len(linear_weight), target, weight, mask, ignore_index, torch.float64)
        gradients = results.d_input, results.d_weight, results.d_bias
        return _linear_rows.backward(grad, gradients, (need_input, need_weight, need_bias), input.dtype, keep)


_linear_cross_entropy = LinearCrossEntropy()
_linear_cross_entropy.example = "torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])"


# ---- public function


@_linear_cross_entropy.public(
    "(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, Tensor? weight=None, "
    'Tensor? mask=None, str reduction="mean", int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, '
    'Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS.replace("(N, d1, ...)", "(...)").replace(" (RuntimeError where the call is compiled)", ""),
)
def linear_cross_entropy(
    input, linear_weight, target, *, linear_bias=None, weight=None, mask=None, reduction="mean", ignore_index=-100,
    label_smoothing=0.0, z_loss=0.0, denominator=None, empty="zero",
):  # fmt: skip
    """`cross_entropy` of the logits input @ linear_weight.T + linear_bias, without their memory.

    As `torch.nn.functional.linear_cross_entropy`. Eight million logits, or an eighth of all, exist at a time. Products
    are in the operands' dtype; their sums, softmax, loss, and sums over chunks in fp32; each gradient is rounded last.

    The gradients of a mean or sum are made with the loss and kept for backward: three products, as a linear layer and
    its loss take. Half weights need a buffer in fp32 for that, of 2 D rows of logits; where it does not fit an eighth
    of them, with fewer than about 16 D rows, and with "none", backward computes the logits again: one product more.
    Second derivatives, functorch transforms and `torch.export` make all logits at once, in fp32. Infinite logits are
    as in `cross_entropy`, and a class with a bias of -inf does not exist. Chunks: Wijmans et al., "Cut Your Losses in
    Large-Vocabulary Language Models", 2025; gradients with the loss: Hsu et al., "Liger Kernel", 2024.

    Args:
        input: (..., D) floating tensor, a vector for each row.
        linear_weight: (C, D) tensor of `input`'s dtype. Under autocast they may differ, and both are read in its dtype.
        target: class indices in [0, C), int64, int32 or uint8, of shape (...).
        linear_bias: (C,) tensor of `input`'s dtype.
        label_smoothing: from 0 to 1, the share of the loss that is spread over all classes.
        z_loss: factor of the squared logsumexp, at least 0.
        {arguments}

    Example:
        >>> input, linear_weight = torch.eye(3), torch.tensor([[2.0, 0.0, torch.nan], [0.0, 0.0, torch.nan]])
        >>> input, linear_weight = input[:2, :2], linear_weight[:, :2]
        >>> safeops.linear_cross_entropy(input, linear_weight, torch.tensor([0, -100]))
        tensor(0.1269)
    """
    validate_reduction(NAME, input, reduction, denominator, empty)
    validate_layer(NAME, input, linear_weight, linear_bias)
    validate_per_class(NAME, "weight", weight, linear_weight)
    validate_classes(NAME, input, target, mask)
    check.same_device(NAME, "input", input, weight=weight)
    validate_index(NAME, ignore_index)
    validate_numbers(NAME, label_smoothing, z_loss)
    refuse_missing_class(NAME, target, mask, ignore_index, len(linear_weight), "linear_weight", linear_weight.shape)
    input, linear_weight, linear_bias = in_one_dtype(input, linear_weight, linear_bias)
    rows = target.shape
    mask = None if mask is None else mask.expand(rows)
    if check.mesh(input) is None:  # (rows of several dims may be sharded along each)
        input, target = input.reshape(target.numel(), input.shape[-1]), target.reshape(-1)
        mask = None if mask is None else mask.reshape(-1)
    needs = [False] * 3 if reduction == "none" else _linear_rows.gradients_with_loss(input, linear_weight, linear_bias)
    loss, keep, weights = _linear_cross_entropy.call(
        input, linear_weight, target, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss, *needs
    )
    if reduction == "none":
        return loss.reshape(rows)
    weights = None if weight is None else weights
    if any(needs):
        dtype = compute_dtype(input.dtype)
        return reduce_sum(NAME, loss, keep, weights, reduction, denominator, empty, dtype)
    return reduce(NAME, loss, keep, weights, reduction, denominator, empty)

"""linear_cross_entropy: a linear layer and the cross entropy of its output, which never exists as a whole."""

import torch

from safeops import _check
from safeops._dtypes import compute_dtype, to_one
from safeops._library import declare_raw
from safeops._loss import reduce, validate_options
from safeops._op import registry
from safeops.ops.reductions import masked_logsumexp, masked_sum  # noqa: F401  (the kernels it calls)
from safeops.ops.rows import cross_entropy as _cross_entropy
from safeops.ops.rows._classification import (
    ARGUMENTS,
    INDICES,
    Classification,
    has_missing_class,
    rows_of,
    validate_index,
    validate_numbers,
    validate_reduction,
    validate_weight,
)
from safeops.ops.rows._matmul import matmul

NAME = "linear_cross_entropy"

# ---- definition


def define(
    input, linear_weight, target, linear_bias=None, weight=None, mask=None, ignore_index=-100, label_smoothing=0.0,
    z_loss=0.0,
):  # fmt: skip
    """(loss, keep, weight that a mean divides by), each of N numbers; without such weights the last is empty."""
    compute = compute_dtype(input.dtype)
    _, keep, _ = rows_of(linear_weight.shape[0], target, weight, mask, ignore_index, compute)
    x = torch.where(keep.unsqueeze(-1), input, 0).to(compute)  # select before arithmetic
    logits = matmul(x, linear_weight.to(compute))
    logits = logits if linear_bias is None else logits + linear_bias.to(compute)
    return _cross_entropy.define(logits, target, weight, keep, ignore_index, label_smoothing, z_loss)


# ---- chunks
#
# Of classes, not of rows: each gradient of the weight is then one product over all rows, summed in fp32 inside it and
# rounded once, with no fp32 buffer as large as the weight; and "none" is no other case, for nothing is scaled after the
# fact. The price is a fourth product: the backward computes the logits again.

CHUNK = 2**22  # logits at a time
NO_CLASS = torch.iinfo(torch.int64).min  # what no target is, less the first class of a chunk


def _chunks(x, linear_weight, linear_bias):
    """(slice of the classes, their logits): a buffer of its own each, in the operands' dtype as a linear layer's."""
    size = max(1, CHUNK // max(1, len(x)))
    for first in range(0, len(linear_weight), size):
        part = slice(first, first + size)
        w = linear_weight[part].mT
        yield part, x @ w if linear_bias is None else torch.addmm(linear_bias[part], x, w)


def _own(place, logits):
    """(where in a chunk each row's class is, whether it is there); place: counted from the chunk's first class."""
    inside = (place >= 0) & (place < logits.shape[1])
    return torch.where(inside, place, 0).unsqueeze(1), inside


def _existing(linear_weight, linear_bias, weight):
    """(weight of each class, 0 where its bias of -inf says that there is none; their sum; how many there are)."""
    every = linear_weight.new_ones(len(linear_weight), dtype=torch.float64) if weight is None else weight.double()
    exists = torch.ones_like(every, dtype=torch.bool) if linear_bias is None else linear_bias != float("-inf")
    every = torch.where(exists, every, 0)
    return every, every.sum(), exists.sum().double()


def _chunked(input, linear_weight, target, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss):
    dtype = compute_dtype(input.dtype)
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    place, keep, weights = rows_of(len(linear_weight), target, weight, mask, ignore_index, compute)
    x = torch.where(keep.unsqueeze(1), input, 0)
    log_sum = x.new_full(place.shape, float("-inf"), dtype=torch.float64)
    own, spread = torch.zeros_like(log_sum), torch.zeros_like(log_sum)
    every, all_weight, count = _existing(linear_weight, linear_bias, weight)
    with torch.autocast(x.device.type, enabled=False):
        for part, logits in _chunks(x, linear_weight, linear_bias):
            of_part = registry["masked_logsumexp"].call(logits, None, -1, False, None, None, "zero")
            log_sum = torch.logaddexp(log_sum, of_part.double())
            at, inside = _own(place - part.start, logits)
            own = torch.where(inside, logits.gather(1, at).squeeze(1), own)
            if label_smoothing:
                w = every[part]
                spread += registry["masked_sum"].call(logits, w != 0, -1, False, w, torch.float64, "zero")
    loss = log_sum - own if weights is None else weights * (log_sum - own)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing / count * (all_weight * log_sum - spread)
    loss = torch.where(keep, loss + z_loss * log_sum.square() if z_loss else loss, 0).to(dtype)
    return loss, keep, loss.new_empty(0) if weights is None else weights, log_sum


def _chunked_backward(
    grad, input, linear_weight, target, log_sum, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss,
    need_input, need_weight, need_bias,
):  # fmt: skip
    compute = compute_dtype(input.dtype, grad.dtype)
    place, keep, weights = rows_of(len(linear_weight), target, weight, mask, ignore_index, torch.float64)
    x = torch.where(keep.unsqueeze(1), input, 0)
    g = torch.where(keep, grad, 0).double()
    scale = _into_range(x.dtype, g if weights is None else g * weights)
    slopes = _slopes_by_kernel if _has_kernel(x, weight, label_smoothing, z_loss) else _slopes
    slopes = slopes(g * scale, keep, log_sum, weights, _existing(linear_weight, linear_bias, weight), label_smoothing,
                    z_loss, compute)  # fmt: skip
    d_input = x.new_zeros(x.shape if need_input else 0, dtype=compute)  # fp32 over the chunks
    d_weight = torch.empty_like(linear_weight if need_weight else x[:0, :0], memory_format=torch.contiguous_format)
    d_bias = x.new_empty(len(linear_weight) if need_bias else 0)
    with torch.autocast(x.device.type, enabled=False):
        for part, logits in _chunks(x, linear_weight, linear_bias):
            slope = slopes(logits, place - part.start, part)
            if need_bias:
                d_bias[part] = registry["masked_sum"].call(slope, None, 0, False, None, None, "zero")
            slope = slope.to(x.dtype)
            if need_input and compute == x.dtype:
                d_input.addmm_(slope, linear_weight[part])
            elif need_input:
                d_input += slope @ linear_weight[part]
            if need_weight:
                torch.mm(slope.mT, x, out=d_weight[part])
            del logits, slope  # before the next are made
    return (d_input / scale).to(x.dtype), d_weight.div_(scale), d_bias.div_(scale)


# The slopes to the logits of a chunk, share p - even w, less the own part at the row's class, p = exp(logit - log_sum):
# by the backward kernel of cross_entropy, or in torch.


def _has_kernel(x, weight, label_smoothing, z_loss):
    """Class weights are a factor of the row for the kernel; but not of the smoothing, nor of the z-loss."""
    return registry["cross_entropy"].cpu and x.is_cpu and (weight is None or not (label_smoothing or z_loss))


def _slopes_by_kernel(g, keep, log_sum, weights, existing, label_smoothing, z_loss, compute):
    count, g = existing[2], (g if weights is None else g * weights).to(compute)
    numbers = torch.stack([log_sum, label_smoothing / count.expand(log_sum.shape)][: 2 if label_smoothing else 1])

    def slopes(logits, place, part):
        options = keep, NO_CLASS, label_smoothing, z_loss
        return _cross_entropy._backward(g, logits, place, numbers, None, *options, True, False, True)[0]

    return slopes


def _slopes(g, keep, log_sum, weights, existing, label_smoothing, z_loss, compute):
    every, all_weight, count = existing
    log_sum = torch.where(keep, log_sum, float("inf"))  # p = 0
    own = (1 - label_smoothing) * (g if weights is None else g * weights)
    even = label_smoothing * g / count
    share = own + all_weight * even + torch.where(keep, 2 * z_loss * log_sum * g, 0)
    even, every = even.to(compute), every.to(compute)
    log_sum, share, own = (t.to(compute).unsqueeze(1) for t in (log_sum, share, own))

    def slopes(logits, place, part):
        slope = logits.to(compute).sub_(log_sum).exp_().mul_(share)
        if label_smoothing:
            slope.addr_(even, every[part], alpha=-1)
        at, inside = _own(place, logits)
        return slope.scatter_add_(1, at, torch.where(inside.unsqueeze(1), -own, 0))

    return slopes


def _into_range(dtype, g):
    """A power of two by which the slopes to the logits fit fp16. The gradients made of them need not: those are inf."""
    if dtype != torch.float16 or not len(g):
        return 1.0
    largest = g.abs().amax()
    return torch.where(largest.isfinite() & (largest > 2.0**14), to_one(largest) * 2.0**14, 1)


# ---- op


def _fake(input, linear_weight, target, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss):
    rows, dtype = input.shape[:1], compute_dtype(input.dtype)
    wide = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    return (
        input.new_empty(rows, dtype=dtype),
        input.new_empty(rows, dtype=torch.bool),
        input.new_empty(0, dtype=dtype) if weight is None else input.new_empty(rows, dtype=wide),
        input.new_empty(rows, dtype=torch.float64),
    )


def _fake_backward(grad, input, linear_weight, *operands):
    need_input, need_weight, need_bias = operands[-3:]
    return (
        input.new_empty(input.shape if need_input else 0),
        input.new_empty(linear_weight.shape if need_weight else (0, 0)),
        input.new_empty(linear_weight.shape[0] if need_bias else 0),
    )


_OPERANDS = "Tensor? linear_bias=None, Tensor? weight=None, Tensor? mask=None, int ignore_index=-100, " + (
    "float label_smoothing=0.0, float z_loss=0.0"
)
_forward = declare_raw(
    "_linear_cross_entropy",
    f"(Tensor input, Tensor linear_weight, Tensor target, {_OPERANDS}) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
    composite=_chunked,
)
_backward = declare_raw(
    "_linear_cross_entropy_backward",
    f"(Tensor grad, Tensor input, Tensor linear_weight, Tensor target, Tensor log_sum, {_OPERANDS}, "
    "bool need_input=True, bool need_weight=False, bool need_bias=False) -> (Tensor, Tensor, Tensor)",
    fake=_fake_backward,
    composite=_chunked_backward,
)

# ---- record


class LinearCrossEntropy(Classification):
    """Four products of N x D x C, three without the weight's gradient. Saved: the logsumexp of each row.

    The raw ops are in Python, and for every device: the definition, which makes all logits at once, is no substitute.
    """

    owner = None
    differentiable = (0, 1, 3)
    constant = slice(4, 5)  # the class weights
    saved = slice(3, 4)
    compiled = ("cpu", "cuda")

    def __init__(self):
        super().__init__(NAME, "LinearCrossEntropyLoss", _forward, _backward, define)
        self.raw, self.cpu, self.cuda = (), True, True

    def prepare(self, *operands):
        return True, operands

    def validate(self, *operands):
        """The public function has, of operands with their own shapes."""

    def validate_options(self, name, reduction, empty, ignore_index, label_smoothing, z_loss):
        """What a module's constructor takes."""
        validate_options(name, reduction, empty)
        validate_index(name, ignore_index)
        validate_numbers(name, label_smoothing, z_loss)

    def gradients(self, grad, needs, operands, results):
        input, linear_weight, target, *rest = operands
        return self.backward(grad, input, linear_weight, target, *results, *rest, needs[0], needs[1], needs[3])


_linear_cross_entropy = LinearCrossEntropy()
_linear_cross_entropy.example = "torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])"


def _validate(input, linear_weight, target, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss):
    named = {"input": input, "linear_weight": linear_weight}
    if linear_bias is not None:
        named["linear_bias"] = linear_bias
    for key, x in named.items():
        _check.floating(NAME, key, x)
    if linear_weight.dim() != 2:
        raise ValueError(f"{NAME}: linear_weight must be (C, D), got {tuple(linear_weight.shape)}")
    if input.dim() == 0 or input.shape[-1] != linear_weight.shape[1]:
        raise ValueError(
            f"{NAME}: input {tuple(input.shape)} must be (..., D), linear_weight is (C, D) = "
            f"{tuple(linear_weight.shape)}"
        )
    rows, classes = input.shape[:-1], linear_weight.shape[0]
    for key, x in {"linear_bias": linear_bias, "weight": weight}.items():
        if x is not None:
            _check.floating(NAME, key, x)
            if tuple(x.shape) != (classes,):
                raise ValueError(f"{NAME}: {key} must be ({classes},), one a class, got {tuple(x.shape)}")
    _check.tensor(NAME, "target", target)
    if target.dtype not in INDICES:
        raise TypeError(f"{NAME}: target must be class indices, int64, int32 or uint8, got {target.dtype}")
    if target.shape != rows:
        raise ValueError(f"{NAME}: target {tuple(target.shape)} must have the shape of input's rows {tuple(rows)}")
    validate_weight(NAME, weight)
    _check.mask(NAME, "mask", mask, "the rows", rows)
    validate_index(NAME, ignore_index)
    validate_numbers(NAME, label_smoothing, z_loss)
    for key, x in {**named, "target": target, "mask": mask, "weight": weight}.items():
        if x is not None:
            _check.no_dtensor(NAME, key, x)
    _check.same_device(NAME, "input", input, **{**named, "target": target, "mask": mask, "weight": weight})
    dtypes = [x.dtype for x in named.values()]
    if len(set(dtypes)) > 1 and not torch.is_autocast_enabled(input.device.type):
        raise TypeError(
            f"{NAME}: {', '.join(named)} must be of one dtype, as in a linear layer outside autocast, got "
            f"{', '.join(map(str, dtypes))}"
        )
    if has_missing_class(target, mask, ignore_index, classes):
        kept = target if mask is None else target[mask.expand(target.shape)]
        wrong = kept[((kept < 0) | (kept >= classes)) & (kept != ignore_index)][0].item()
        raise IndexError(
            f"{NAME}: target {wrong} is out of range for the {classes} classes of linear_weight "
            f"{tuple(linear_weight.shape)}, and not ignore_index ({ignore_index})"
        )


# ---- public function


@_linear_cross_entropy.public(
    "(Tensor input, Tensor linear_weight, Tensor target, *, Tensor? linear_bias=None, Tensor? weight=None, "
    'Tensor? mask=None, str reduction="mean", int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, '
    'Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS.replace("(N, d1, ...)", "(...)"),
)
def linear_cross_entropy(
    input, linear_weight, target, *, linear_bias=None, weight=None, mask=None, reduction="mean", ignore_index=-100,
    label_smoothing=0.0, z_loss=0.0, denominator=None, empty="zero",
):  # fmt: skip
    """`cross_entropy` of the logits input @ linear_weight.T + linear_bias, without their memory.

    As `torch.nn.functional.linear_cross_entropy`. Four million logits exist at a time, forward and backward, which
    computes them again: one product more than a linear layer and its loss, for a language model's largest tensors. The
    products are in the operands' dtype, their sums, softmax and loss in fp32: that over the chunks for `input`'s
    gradient, and that over all rows for the weight's and the bias's, each rounded once. Second derivatives, functorch
    transforms and `torch.export` make all logits at once, in fp32. Infinite logits are NaN, but a class with a bias of
    -inf does not exist. Chunks: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2025.

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
    validate_reduction(NAME, reduction, denominator, empty)
    _validate(input, linear_weight, target, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss)
    if denominator is not None:
        _check.same_device(NAME, "input", input, denominator=denominator)
    given = [x for x in (input, linear_weight, linear_bias) if x is not None]
    if len({x.dtype for x in given}) > 1:
        dtype = torch.get_autocast_dtype(input.device.type)
        input, linear_weight, linear_bias = (
            x if x is None else x.to(dtype) for x in (input, linear_weight, linear_bias)
        )
    rows = target.shape
    flat = None if mask is None else mask.expand(rows).reshape(-1)
    loss, keep, weights = _linear_cross_entropy.call(
        input.reshape(-1, input.shape[-1]), linear_weight, target.reshape(-1), linear_bias, weight, flat, ignore_index,
        label_smoothing, z_loss,
    )  # fmt: skip
    if reduction == "none":
        return loss.reshape(rows)
    return reduce(NAME, loss, keep, None if weight is None else weights, reduction, denominator, empty)

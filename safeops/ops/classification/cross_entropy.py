"""cross_entropy: the negative log probability of each row's class, or of its class probabilities."""

from typing import NamedTuple

import torch

from safeops.core import check
from safeops.core.dtypes import FLOATING, LARGEST, compute_dtype, wide_on_cpu
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw
from safeops.core.loss_reduction import validate_options
from safeops.core.private_torch import saved_by_name
from safeops.core.symbolic import symbolic
from safeops.ops.classification import _support
from safeops.ops.classification._classification import (
    ARGUMENTS,
    INDICES,
    Classification,
    class_dim,
    gather_classes,
    is_watched,
    normalized_weight,
    row_shape,
    rows_of,
    validate_index,
    validate_numbers,
    validate_reduction,
    without_weight_0,
)
from safeops.ops.classification._cross_entropy_of_support import OUTSIDE, of_support, reduce_weighed, with_outside
from safeops.ops.classification._logits import as_floats, is_zero, shaped, slope_of_shape, validate_logits

NAME = "cross_entropy"
BLOCK = 2**22  # _composite_overwrite computes this many elements of the gradient at a time, in a temporary


@saved_by_name
class CrossEntropyOfSupport(NamedTuple):
    loss: torch.Tensor
    outside: torch.Tensor


# ---- definition


def define(
    input, target, weight=None, mask=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, temperature=1.0,
    softcap=0.0,
):  # fmt: skip
    """Returns (loss, keep, weights that a mean divides by), each of the rows' shape; no weights: an empty tensor."""
    input, dim, has_probabilities = gather_classes(input), class_dim(input), target.is_floating_point()
    dtype = compute_dtype(input.dtype, *((target.dtype,) if has_probabilities else ()))
    # an fp64 weight may be out of fp32's range: it makes the computation fp64
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    weight = None if weight is None else weight.to(compute)  # converted once: so its gradient is rounded once
    # (in fp32 the error of aten's log_softmax on the CPU grows with C: 5e-5 for 262,144 classes)
    x, weights, certain = wide_on_cpu(input.to(compute)), None, None
    if has_probabilities:
        keep = x.new_ones(row_shape(x), dtype=torch.bool)  # (from x: a DTensor if x is one)
        keep = keep if mask is None else keep & mask
        targets = torch.where(keep.unsqueeze(dim), gather_classes(target).to(x.dtype), 0)
    else:
        targets, keep, weights = rows_of(x.shape[dim], target, weight, mask, ignore_index, compute)
    x = shaped(torch.where(keep.unsqueeze(dim), x, 0), temperature, softcap)  # select before arithmetic: NaN * 0 is NaN
    if x.shape[dim] == 0:
        loss = x.sum(dim)  # 0, but in the graph
        loss = loss if not has_probabilities else loss + targets.sum(dim)
        loss = loss if weight is None else loss + weight.sum()
    else:
        if not has_probabilities:
            certain = is_certain(x, targets, dim) & (label_smoothing == 0) & (z_loss == 0)
            x = torch.where(certain.unsqueeze(dim), 0, x)
        per_class = None if weight is None else along(weight.to(x.dtype), x, dim)
        loss = _losses(x, targets, dim, weights, per_class, label_smoothing, z_loss)
    loss = torch.where(keep if certain is None else keep & ~certain, loss, 0).to(dtype)
    return loss, keep, loss.new_empty(0) if weights is None else weights


def along(weight, x, dim):
    """weight (C,) in a shape that broadcasts to x (N, C, d1, ...)."""
    return weight.reshape([-1 if d == dim else 1 for d in range(x.dim())])


def is_certain(x, class_index, dim):
    """Bool of the rows' shape: True for certain rows, with +inf at the row's class alone: loss and gradient are 0."""
    infinite = x.detach() == float("inf")
    of_class = infinite.gather(dim, class_index.unsqueeze(dim)).squeeze(dim)
    return of_class & (infinite.sum(dim) == 1) & ~x.detach().isnan().any(dim)


def _losses(x, targets, dim, weights, per_class, label_smoothing, z_loss):
    """(1 - s) w_y (-log p_y) + s / A sum_c w_c (-log p_c) + z logsumexp^2, with the smoothing s, the z_loss z and a sum
    over the A classes whose logit is not -inf."""
    log_p, exists = torch.log_softmax(x, dim), x != float("-inf")
    if targets.is_floating_point():
        probabilities = targets if per_class is None else targets * per_class
        # A class without probability adds nothing, not even with a logit of -inf.
        absent = ~exists & (probabilities == 0)
        loss = -(probabilities * torch.where(absent, 0, log_p)).sum(dim)
    else:
        loss = -log_p.gather(dim, targets.unsqueeze(dim)).squeeze(dim)
        loss = loss if weights is None else loss * weights
    if not is_zero(label_smoothing):
        terms = torch.where(exists, log_p, 0)
        terms = terms if per_class is None else terms * per_class
        loss = (1 - label_smoothing) * loss - label_smoothing * terms.sum(dim) / exists.sum(dim)
    if not is_zero(z_loss):
        loss = loss + z_loss * torch.logsumexp(x, dim).square()
    return loss


def _row_stats(input, target, weight, loss, keep, weights, label_smoothing, temperature, softcap):
    """The numbers of each row that backward reads, (count_row_stats(...), *rows), in the dtype of the computation.

    They are maximum, the largest logit; log_total = L - maximum, stored apart since a large maximum would hide its
    digits; k, with class probabilities, or with class weights and smoothing; e, with smoothing s. q: the row's class
    probabilities, or the one-hot of its class.
    (1) loss = -(1 - s) sum_c w_c q_c log p_c - e sum_c w_c log p_c + z L^2, with L = logsumexp(x), e = s / A
    (2) d(loss)/dx_c = (k + 2 z L) p_c - e w_c - (1 - s) w_c q_c
    (3) k = (1 - s) sum_c w_c q_c + e sum_c w_c
    The sums after e are over the A classes whose logit is not -inf.
    """
    dim, has_probabilities = class_dim(input), target.is_floating_point()
    x = shaped(torch.where(keep.unsqueeze(dim), input.detach(), 0).double(), temperature, softcap)
    per_class = torch.ones((), dtype=x.dtype, device=x.device)
    if weight is not None:
        per_class = along(weight.detach().double(), x, dim)
    exists = x != float("-inf")
    maximum = x.amax(dim) if x.shape[dim] else x.sum(dim)
    shown = torch.where(loss.isnan() & (maximum == float("inf")), float("nan"), maximum)  # (+inf marks a certain row)
    results = [shown, torch.logsumexp(x - maximum.unsqueeze(dim), dim)]
    if has_probabilities or (weight is not None and label_smoothing != 0):
        if has_probabilities:
            mass = (torch.where(keep.unsqueeze(dim), target.detach(), 0).double() * per_class).sum(dim)
        else:
            mass = weights.detach().double()
        results.append((1 - label_smoothing) * mass)
        if label_smoothing != 0:
            total_weight = (exists * per_class).sum(dim)  # noqa: SO105
            results[2] = results[2] + label_smoothing * total_weight / exists.sum(dim)
    if label_smoothing != 0:
        results.append(label_smoothing / exists.sum(dim).double())
    return torch.stack([torch.where(keep, number, 0) for number in results]).to(_numbers_dtype(input, target, weight))


def _numbers_dtype(input, target, weight):
    return compute_dtype(*(t.dtype for t in (input, target, weight) if t is not None and t.is_floating_point()))


def count_row_stats(target, weight, label_smoothing):
    smooth = label_smoothing != 0
    return 2 + (target.is_floating_point() or (weight is not None and smooth)) + smooth


def _composite(
    input, target, weight=None, mask=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, temperature=1.0,
    softcap=0.0,
):  # fmt: skip
    loss, keep, weights = define(
        input, target, weight, mask, ignore_index, label_smoothing, z_loss, temperature, softcap
    )
    row_stats = _row_stats(input, target, weight, loss, keep, weights, label_smoothing, temperature, softcap)
    return loss, keep, weights, row_stats


# partial: True if `input` holds some of the classes, perhaps not the row's own. row_stats are of all classes.
def _composite_backward(
    grad, input, target, row_stats, weight, mask, ignore_index, label_smoothing, z_loss, temperature, softcap,
    need_input, need_target, partial,
):  # fmt: skip
    dim, has_probabilities = class_dim(input), target.is_floating_point()
    if not input.numel():
        return _fake_backward(grad, input, target, need_input, need_target, partial)
    compute = compute_dtype(row_stats.dtype, grad.dtype)
    if has_probabilities:
        own = grad.new_ones(grad.shape, dtype=torch.bool) if mask is None else mask.expand(grad.shape)
        weights = None
    else:
        class_index, own, weights = rows_of(input.shape[dim], target, weight, mask, ignore_index, compute)
    keep = own
    if partial:
        keep = torch.ones_like(own) if mask is None else mask.expand(own.shape)
    maximum, log_total, *others = (x.to(compute).unsqueeze(dim) for x in row_stats)
    keep = keep.unsqueeze(dim) & (maximum != float("inf"))  # (the loss of a certain row is constant)
    g, x = torch.where(keep, grad.to(compute).unsqueeze(dim), 0), torch.where(keep, input, 0).to(compute)
    per_class = 1 if weight is None else along(weight.to(compute), x, dim)
    logits = shaped(x, temperature, softcap)
    log_p = (logits - torch.where(keep, maximum, 0)) - log_total
    smooth = label_smoothing != 0
    factor = others[0] if len(others) > smooth else 1 if weights is None else weights.unsqueeze(dim)
    slope = (factor + 2 * z_loss * torch.where(keep, maximum + log_total, 0)) * log_p.exp()
    if smooth:
        slope = slope - torch.where(logits != -float("inf"), others[-1] * per_class, 0)
    if has_probabilities:
        q = torch.where(keep, target, 0).to(compute) * per_class
        slope = slope - (1 - label_smoothing) * q
        d_target = (label_smoothing - 1) * g * per_class * torch.where((q == 0) & (log_p == -float("inf")), 0, log_p)
    else:
        own_part = torch.where(own, 1.0 if weights is None else weights, 0).to(compute)
        slope = slope.scatter_add(dim, class_index.unsqueeze(dim), (label_smoothing - 1) * own_part.unsqueeze(dim))
    d_input = torch.where(keep, g * slope * slope_of_shape(x, temperature, softcap), 0).to(input.dtype)
    nothing = input.new_empty(0)
    d_target = torch.where(keep, d_target, 0).to(target.dtype) if need_target else nothing
    return d_input if need_input else nothing, d_target


def _composite_overwrite(grad, logits, *options):
    size = max(1, BLOCK // max(1, logits.shape[1]))
    target, row_stats, weight, mask, *options = options
    for first in range(0, len(logits), size):
        rows = slice(first, first + size)
        chunk = grad[rows], logits[rows], target[rows], row_stats[:, rows].contiguous(), weight, mask[rows]
        logits[rows] = _backward(*chunk, *options, True, False, False)[0]


# ---- op


def _fake(input, target, weight, mask, ignore_index, label_smoothing, *_):
    shape, has_probabilities = row_shape(input), target.is_floating_point()
    dtype = compute_dtype(input.dtype, *((target.dtype,) if has_probabilities else ()))
    weighted = weight is not None and not has_probabilities
    return (
        input.new_empty(shape, dtype=dtype),
        input.new_empty(shape, dtype=torch.bool),
        input.new_empty(shape, dtype=compute_dtype(dtype, weight.dtype))
        if weighted
        else input.new_empty(0, dtype=dtype),
        input.new_empty(
            (count_row_stats(target, weight, label_smoothing), *shape), dtype=_numbers_dtype(input, target, weight)
        ),
    )


def _fake_reduced(*operands):
    loss, _, _, row_stats = _fake(*operands[:-2])
    return loss.new_empty(()), loss.new_empty((), dtype=torch.float64), row_stats


def _fake_backward(grad, input, target, *options):
    *_, need_input, need_target, _ = options
    d_input = torch.empty_like(input) if need_input else input.new_empty(0)
    return d_input, torch.empty_like(target) if need_target else input.new_empty(0)


_forward = declare_raw(
    "_cross_entropy",
    "(Tensor input, Tensor target, Tensor? weight=None, Tensor? mask=None, int ignore_index=-100, "
    "float label_smoothing=0.0, float z_loss=0.0, float temperature=1.0, float softcap=0.0) "
    "-> (Tensor loss, Tensor keep, Tensor weights, Tensor row_stats)",
    fake=_fake,
    composite=_composite,
    triton="classification.cross_entropy.cross_entropy",
)
_backward = declare_raw(
    "_cross_entropy_backward",
    "(Tensor grad, Tensor input, Tensor target, Tensor row_stats, Tensor? weight=None, Tensor? mask=None, "
    "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, float temperature=1.0, float softcap=0.0, "
    "bool need_input=True, bool need_target=False, bool partial=False) -> (Tensor, Tensor)",  # partial: not all classes
    fake=_fake_backward,
    composite=_composite_backward,
    triton="classification.cross_entropy_backward.cross_entropy_backward",
)
_overwrite = declare_raw(  # for class indices: overwrites the logits (N, C) by their gradient
    "_cross_entropy_overwrite",
    "(Tensor grad, Tensor(a!) logits, Tensor target, Tensor row_stats, Tensor? weight, Tensor mask, int ignore_index, "
    "float label_smoothing, float z_loss, float temperature, float softcap) -> ()",
    fake=lambda *_: None,
    composite=_composite_overwrite,
    triton="classification.cross_entropy_backward.cross_entropy_overwrite",
)

_reduced = declare_raw(
    "_cross_entropy_reduced",
    "(Tensor input, Tensor target, Tensor? weight=None, Tensor? mask=None, int ignore_index=-100, "
    "float label_smoothing=0.0, float z_loss=0.0, float temperature=1.0, float softcap=0.0, bool mean=True, "
    "bool empty_nan=False) -> (Tensor loss, Tensor denominator, Tensor row_stats)",
    fake=_fake_reduced,
    triton="classification.cross_entropy.cross_entropy_reduced",
)
_reduced_backward = declare_raw(
    "_cross_entropy_reduced_backward",
    "(Tensor grad, Tensor? denominator, Tensor input, Tensor target, Tensor row_stats, Tensor? weight=None, "
    "Tensor? mask=None, int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, float temperature=1.0, "
    "float softcap=0.0, bool need_input=True, bool need_target=False) -> (Tensor, Tensor)",
    fake=lambda grad, denominator, *operands: _fake_backward(grad, *operands, False),
    triton="classification.cross_entropy_backward.cross_entropy_reduced_backward",
)

# ---- record


class CrossEntropy(Classification):
    """I/O: forward reads the logits; backward reads them, and writes their gradient. Saved: two to four numbers a row.

    torch.compile keeps the kernel on CUDA too: Inductor's code reads the logits a second time, for their maximum.
    """

    takes_logits = True
    differentiable = ("input", "target")
    saved = ("row_stats",)
    compiled = ("cpu", "cuda")

    def prepare(self, input, target, weight, mask, ignore_index, label_smoothing, z_loss, temperature, softcap):
        options = ignore_index, label_smoothing, z_loss
        if softcap is not None or temperature.__class__ is not float or temperature != 1.0:
            options += as_floats(self.name, temperature, softcap)
        if is_watched(input):
            return False, (input, target, weight, mask, *options)
        if target.dtype not in INDICES[:2]:
            if target.dtype == torch.uint8:
                target = target.to(torch.int32)
            elif target.dtype not in FLOATING or ignore_index >= 0:
                return False, ()
        plain = label_smoothing.__class__ is float and z_loss.__class__ is float and ignore_index.__class__ is int
        if not (plain and 0 <= label_smoothing <= 1 and 0 <= z_loss <= LARGEST):
            self.validate(input, target, weight, mask, ignore_index, label_smoothing, z_loss, temperature, softcap)
        return True, (input, target, weight, mask, *options)

    def validate(
        self, input, target, weight, mask, ignore_index, label_smoothing, z_loss, temperature=1.0, softcap=None
    ):
        name = self.name
        self.validate_input(input, target)
        validate_index(name, ignore_index)
        if not target.is_floating_point():
            self.validate_indices(input, target, " or floating (probabilities)")
        else:
            check.floating(name, "target", target)
            if target.shape != input.shape:
                if tuple(target.shape) == row_shape(input):
                    raise TypeError(
                        f"{name}: target {check.shown(target)} must be int64, int32 or uint8 where it holds class "
                        f"indices, got {target.dtype}: say target.long()"
                    )
                raise ValueError(
                    f"{name}: target {check.shown(target)} of probabilities must have the shape of input "
                    f"{check.shown(input)}"
                )
            if ignore_index >= 0:
                raise ValueError(f"{name}: ignore_index {ignore_index} is for class indices, target is {target.dtype}")
        self.validate_common(input, target, weight, mask, ignore_index)
        validate_numbers(name, label_smoothing, z_loss)
        validate_logits(name, temperature, softcap)

    def validate_operands(self, *operands):
        *arguments, temperature, softcap = operands
        self.validate(*arguments, temperature, softcap or None)

    def validate_options(
        self, name, reduction, empty, ignore_index, label_smoothing, z_loss, temperature, softcap, outside="-inf"
    ):
        """Check the options of a module's constructor."""
        validate_options(name, reduction, empty)
        validate_index(name, ignore_index)
        validate_numbers(name, label_smoothing, z_loss)
        validate_logits(name, temperature, softcap)
        check.choice(name, "outside", outside, _support.OUTSIDE)

    def gradients_of(self, backward, upstream, needs, operands, row_stats):
        input, target, *options = operands
        return backward(*upstream, input, target, row_stats, *options, *needs[:2])


_cross_entropy = CrossEntropy(
    "cross_entropy", "CrossEntropyLoss", _forward, _backward, define, _reduced, _reduced_backward
)
_cross_entropy.example = "torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])"

# ---- public function

_PUBLIC = (
    '(Tensor input, Tensor target, Tensor? weight=None, *, Tensor? mask=None, str reduction="mean", '
    "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, Tensor? row_weight=None, "
    'float temperature=1.0, float? softcap=None, Tensor? denominator=None, str empty="zero"{}) -> {}'
)


@_cross_entropy.public(
    _PUBLIC.format("", "Tensor"),
    ".support"
    + _PUBLIC.format(
        ', Tensor[] support, Tensor? support_threshold=None, str outside="-inf"', "(Tensor loss, Tensor outside)"
    ),
    arguments=_support.SUPPORT + OUTSIDE + with_outside(ARGUMENTS),
)
def cross_entropy(
    input, target, weight=None, *extra, mask=None, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
    row_weight=None, temperature=1.0, softcap=None, denominator=None, empty="zero", support=None,
    support_threshold=None, outside="-inf", **unknown,
):  # fmt: skip
    """-log p_y of each row, with p = softmax(input) and y its class `target`; the mean over the kept rows.

        loss = (1 - s) w_y (-log p_y) + s / A sum_c w_c (-log p_c) + z_loss (log sum_c exp x_c)^2,   p = softmax(x)

    for logits x, class y, class weights w and label smoothing s over the A classes. With class probabilities q in place
    of y the first term is (1 - s) sum_c w_c q_c (-log p_c).

    Smoothing: Szegedy et al., "Rethinking the Inception Architecture", 2016. z-loss: Chowdhery et al., "PaLM", 2022,
    section 5, and Zoph et al., "ST-MoE", 2022. It keeps the logsumexp near 0; 1e-4 is usual. Class weights do not
    multiply it, and their sum does not divide it: it has its own mean, over the kept rows.

    Logits are read in place in any layout, in half without a copy in fp32. The only allocation of their size is their
    gradient.

    Like torch.nn.functional.cross_entropy, except that a mean of nothing is `empty` and not NaN, and that NaN in a row
    that `ignore_index` or `mask` excludes has no effect.

    Infinite logits give limits. A class of -inf does not exist: its gradient is 0, and smoothing is over the others; if
    it is the row's own class, the loss is inf. If the row's own logit alone is +inf, loss and gradient are 0. Every
    other inf or NaN in a kept row gives NaN.

    With a `support` the loss is over its classes alone: smoothing is over them, and the z-loss is of their logsumexp. A
    bool one, or a threshold, costs a copy of the logits, with -inf at other classes, and a byte for each. In CSR form
    only the logits of its classes are read, by torch ops, with some numbers for each of them.

    Args:
        input: (N, C), (C,) or (N, C, d1, ...) floating tensor of logits.
        target: class indices in [0, C), int64, int32 or uint8, of shape (N,), () or (N, d1, ...); or class
            probabilities, floating, of `input`'s shape. Probabilities are differentiable.
        label_smoothing: from 0 to 1, the share of the loss that is spread over all classes.
        z_loss: factor of the squared logsumexp, at least 0. With class weights and class indices, its mean is separate
            and without these weights. A `denominator` divides both terms: for exact accumulation, z_loss needs a call
            of its own, without class weights.
        row_weight: floating tensor, broadcastable to the rows' shape. It multiplies each row's loss, and the mean
            divides by its sum (times the class weights). A row of weight 0 is masked out. Differentiable.
        temperature: divides the logits, above 0.
        softcap: above 0: a logit x is read as softcap tanh(x / softcap), before the temperature. None: x as it is.
        {arguments}

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, torch.nan]])
        >>> safeops.cross_entropy(logits, torch.tensor([0, -100]))
        tensor(0.2395)
        >>> kept = torch.tensor([[True, True, False], [True, True, True]])
        >>> safeops.cross_entropy(logits, torch.tensor([0, -100]), support=kept).loss
        tensor(0.1269)
    """
    if extra or unknown:
        refuse(cross_entropy, extra, unknown)
    validate_reduction(NAME, input, reduction, denominator, empty)
    if row_weight is not None:
        mask = without_weight_0(NAME, row_weight, mask, input)
    operands = input, target, weight, mask, ignore_index, label_smoothing, z_loss, temperature, softcap
    if support is not None or support_threshold is not None or outside != "-inf":
        options = row_weight, reduction, denominator, empty, (support, support_threshold), outside
        return CrossEntropyOfSupport(*of_support(_cross_entropy, cross_entropy, operands, *options))
    own_mean = weight is not None and reduction == "mean" and denominator is None
    if own_mean and (symbolic(z_loss) or z_loss != 0):
        _cross_entropy.validate(*operands)
        if not target.is_floating_point():
            weight = normalized_weight(weight, input, class_dim(input), target, mask, ignore_index, row_weight)
            operands = *operands[:2], weight, *operands[3:]
    reduced = _cross_entropy.reduced
    if row_weight is None and reduced.serves(input, target, reduction, denominator, empty):
        return reduced.call(*operands, reduction == "mean", empty == "nan")
    loss, keep, weights = _cross_entropy.call(*operands)
    per_row = None if weight is None or target.is_floating_point() else weights
    return reduce_weighed(NAME, loss, keep, per_row, row_weight, reduction, denominator, empty)

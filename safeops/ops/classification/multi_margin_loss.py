"""multi_margin_loss: the score of a row's class should exceed all others by a margin."""

import torch
from torch.compiler import is_compiling

from safeops.core import check, loss_reduction
from safeops.core.composed_loss import ARGUMENTS_BY_CLASS, hinge, one_a_row, validate_class_weight, vectors
from safeops.core.definitions import accumulate
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw, like
from safeops.ops.classification._classification import (
    INDICES,
    Classification,
    is_watched,
    refuse_missing_class,
    validate_reduction,
)

NAME = "multi_margin_loss"

# ---- definition


def own_class(place, x):
    """Bool (..., C): True at the row's own class. place: (...), class of each row."""
    # (new_ones, not arange, makes the class numbers: they are a DTensor if x is one)
    return place.unsqueeze(-1) == x.new_ones(x.shape[-1], dtype=torch.int64).cumsum(0) - 1


def losses(input, place, margin, p):
    """The losses (...) of rows. place: (...) int64, the row's own class; -1 for a row without a class: loss 0."""
    is_target, there = own_class(place, input), (place >= 0).unsqueeze(-1)
    x = torch.where(there, input, 0).to(compute_dtype(input.dtype))  # select before arithmetic: NaN * 0 is NaN
    d = hinge(margin - torch.where(is_target, x, 0).sum(-1, keepdim=True) + x)
    d = torch.where(is_target | ~there, 0, d * d if p == 2 else d)
    return (accumulate(d, -1) / max(input.shape[-1], 1)).to(d.dtype)


def define(input, target, weight=None, mask=None, margin=1.0, p=1):
    """Returns (losses, keep), of the rows' shape. keep: rows that a mean counts, also those of a class of weight 0."""
    classes = input.shape[-1]
    index = target.long() if mask is None else torch.where(mask, target, 0).long()
    keep = check.in_range(index, classes, True)
    keep = keep if mask is None else keep & mask
    if weight is None:
        return losses(input, torch.where(keep, index, -1), margin, p), keep
    wide = weight.to(compute_dtype(input.dtype, weight.dtype)).expand(*input.shape[:-1], classes)
    w = torch.where(own_class(torch.where(keep, index, 0), wide), wide, 0).sum(-1)
    exists = keep & (w != 0)
    loss = losses(input, torch.where(exists, index, -1), margin, p)
    return torch.where(exists, loss * w, 0).to(loss.dtype), keep


# ---- op


def _fake(input, target, *_):
    dtype = compute_dtype(input.dtype)
    return input.new_empty(target.shape, dtype=dtype), input.new_empty(target.shape, dtype=torch.bool)


def _fake_reduced(input, *_):
    dtype = compute_dtype(input.dtype)
    return input.new_empty((), dtype=dtype), input.new_empty((), dtype=torch.float64)


OPERANDS = "Tensor input, Tensor target, Tensor? weight=None, Tensor? mask=None, float margin=1.0, int p=1"
_forward = declare_raw(
    "_multi_margin_loss",
    f"({OPERANDS}) -> (Tensor loss, Tensor keep)",
    fake=_fake,
    composite=define,
    triton="classification.multi_margin_loss.multi_margin_loss",
)
_backward = declare_raw(
    "_multi_margin_loss_backward",
    f"(Tensor grad, {OPERANDS}) -> Tensor",
    fake=lambda grad, input, *_: like(input, input.shape, input.dtype),
    triton="classification.multi_margin_loss.multi_margin_loss_backward",
)
_reduced = declare_raw(
    "_multi_margin_loss_reduced",
    f"({OPERANDS}, bool mean=True, bool empty_nan=False) -> (Tensor loss, Tensor denominator)",
    fake=_fake_reduced,
    triton="classification.multi_margin_loss.multi_margin_loss_reduced",
)
_reduced_backward = declare_raw(
    "_multi_margin_loss_reduced_backward",
    f"(Tensor grad, Tensor? denominator, {OPERANDS}) -> Tensor",
    fake=lambda grad, denominator, input, *_: like(input, input.shape, input.dtype),
    triton="classification.multi_margin_loss.multi_margin_loss_reduced_backward",
)

# ---- record


class MultiMarginLoss(Classification):
    """The record. Forward and backward read the scores once; backward writes their gradient. Classes: the last dim."""

    visible, saved, shards = 2, (), None

    def prepare(self, input, target, weight, mask, margin, p):
        if is_watched(input):
            return False, (input, target, weight, mask, margin, p)
        plain = margin.__class__ is float and p.__class__ is int and p in (1, 2)
        plain = plain and (is_compiling() or input.numel())  # a kernel does not check rows without classes
        if not plain or target.dtype not in INDICES[:2]:
            self.validate(input, target, weight, mask, margin, p)
            p, target = 2 if p == 2 else 1, target.long()
        if is_compiling():  # in a trace a class out of range does not raise: its row is masked out
            inside = check.in_range(target, input.shape[-1], True)
            mask = inside if mask is None else mask & inside
        return True, (input, target, weight, mask, margin, p)

    def validate(self, input, target, weight, mask, margin, p):
        name, rows = self.name, vectors(self.name, input=input)
        one_a_row(name, "target", target, input, rows, classes=True)
        if target.is_floating_point() or target.dtype == torch.bool:
            raise TypeError(f"{name}: target must be class indices, integers, got {target.dtype}")
        validate_class_weight(name, weight, input)
        check.mask(name, mask, "the rows", input, rows)
        check.same_device(name, "input", input, target=target, mask=mask, weight=weight)
        self.validate_numbers(name, p, margin)
        refuse_missing_class(name, target, mask, None, input.shape[-1], "input", input.shape)

    def validate_numbers(self, name, p, margin):
        if not check.is_number(p) or p not in (1, 2):
            raise ValueError(f"{name}: p must be 1 or 2, got {p!r}")
        check.number(name, "margin", margin)

    def validate_options(self, name, reduction, empty, p, margin):
        """Check the options of a module's constructor."""
        loss_reduction.validate_options(name, reduction, empty)
        self.validate_numbers(name, p, margin)

    def gradients_of(self, backward, upstream, needs, operands):
        return (backward(*upstream, *operands),)


_multi_margin_loss = MultiMarginLoss(NAME, "MultiMarginLoss", _forward, _backward, define, _reduced, _reduced_backward)
_multi_margin_loss.example = "torch.eye(2), torch.tensor([0, 1])"

# ---- public function


def one_row(input, target):
    """A single row in the shape that fits its target, as in torch: (C,) for target (), (1, C) for target (1,)."""
    tensors = isinstance(input, torch.Tensor) and isinstance(target, torch.Tensor)
    # (the size is compared last: a comparison binds a trace to it)
    one = tensors and (input.dim() < 2 or target.dim() == 0 and input.dim() == 2 and len(input) == 1)
    if not one or target.numel() != 1:
        return input
    return input.reshape(1, -1) if target.dim() else input.reshape(-1)


@_multi_margin_loss.public(
    "(Tensor input, Tensor target, int p=1, float margin=1.0, Tensor? weight=None, *, Tensor? mask=None, "
    'str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS_BY_CLASS,
)
def multi_margin_loss(
    input, target, p=1, margin=1.0, weight=None, *extra, mask=None, reduction="mean", denominator=None, empty="zero",
    **unknown,
):  # fmt: skip
    """sum_j weight[y] max(margin - x_y + x_j, 0)^p / C of each row, y its class and j the others; the mean over rows.

    The mean is over the kept rows. As `torch.nn.functional.multi_margin_loss`, which does not support half on the CPU.

    Args:
        input: floating tensor (..., C), a score x for each class in each row. As in torch, shape () is one class.
        target: tensor (...) of class indices, integers from 0 to C - 1. For a single row it may be () or (1,).
        p: 1 or 2.
        margin: number.
        weight: floating tensor (C,), a weight for each class; a row of a class of weight 0 has loss 0 and gradient 0,
            and counts in the mean. Differentiable.
        {arguments}

    Raises:
        TypeError: `input` is not floating, `target` not of integers, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, `weight` is not of C numbers, devices differ, unknown `reduction` or `empty`,
            `p` is neither 1 nor 2.
        IndexError: on the CPU, a class index of a kept row out of range. On CUDA, and where the call is compiled, such
            a row does not exist.

    Example:
        >>> input = torch.tensor([[0.1, 0.2, 0.4, 0.8]])
        >>> safeops.multi_margin_loss(input, torch.tensor([3]))
        tensor(0.3250)
    """
    if extra or unknown:
        refuse(multi_margin_loss, extra, unknown)
    input = one_row(input, target)
    validate_reduction(NAME, input, reduction, denominator, empty)
    operands = input, target, weight, mask, margin, p
    if _multi_margin_loss.reduced.serves(input, target, reduction, denominator, empty):
        return _multi_margin_loss.reduced.call(*operands, reduction == "mean", empty == "nan")
    loss, keep = _multi_margin_loss.call(*operands)
    return loss_reduction.reduce(NAME, loss, keep, None, reduction, denominator, empty)

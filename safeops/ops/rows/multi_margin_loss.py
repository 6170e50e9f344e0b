"""multi_margin_loss: the score of a row's class is to be above those of the others, by a margin."""

import torch

from safeops.core import check, loss_reduction
from safeops.core.definitions import accumulate, kept
from safeops.core.dtypes import compute_dtype
from safeops.core.library import declare_raw, like
from safeops.core.op import Op
from safeops.ops.rows._classification import refuse_missing_class
from safeops.ops.rows._row_loss import (
    ARGUMENTS_BY_CLASS,
    finish,
    hinge,
    one_a_row,
    validate,
    validate_class_weight,
    vectors,
)

NAME = "multi_margin_loss"

# ---- definition


def own_class(place, x):
    """Which number of a row is its own class's: (..., C)."""
    # (no arange, beside which a DTensor would be a stranger)
    return place.unsqueeze(-1) == x.new_ones(x.shape[-1], dtype=torch.int64).cumsum(0) - 1


def define(input, place, margin=1.0, p=1):
    """The loss of each row. place: (...) int64, a row's own class, or -1 where there is none: its loss is 0."""
    is_target, there = own_class(place, input), (place >= 0).unsqueeze(-1)
    x = torch.where(there, input, 0).to(compute_dtype(input.dtype))  # select before arithmetic
    d = hinge(margin - torch.where(is_target, x, 0).sum(-1, keepdim=True) + x)
    d = torch.where(is_target | ~there, 0, d * d if p == 2 else d)
    return (accumulate(d, -1) / max(input.shape[-1], 1)).to(d.dtype)


# ---- op

_forward = declare_raw(
    "_multi_margin_loss",
    "(Tensor input, Tensor place, float margin=1.0, int p=1) -> Tensor",
    fake=lambda input, place, margin, p: input.new_empty(place.shape, dtype=compute_dtype(input.dtype)),
    composite=define,
    triton="rows.multi_margin_loss.multi_margin_loss",
)
_backward = declare_raw(
    "_multi_margin_loss_backward",
    "(Tensor grad, Tensor input, Tensor place, float margin=1.0, int p=1) -> Tensor",
    fake=lambda grad, input, place, margin, p: like(input, input.shape, input.dtype),
    triton="rows.multi_margin_loss.multi_margin_loss_backward",
)

# ---- record


class MultiMarginLoss(Op):
    """The op is the loss of each row, whose class has been found."""

    module, buffers, example = "MultiMarginLoss", ("weight",), "torch.eye(2), torch.tensor([0, 1])"

    def prepare(self, input, place, margin, p):
        return True, (input, place.contiguous(), margin, p)

    def validate(self, *arguments):
        """The public function has."""

    def validate_options(self, name, reduction, empty, p, margin):
        """Check the options of a module's constructor."""
        loss_reduction.validate_options(name, reduction, empty)
        if not check.is_number(p) or p not in (1, 2):
            raise ValueError(f"{name}: p must be 1 or 2, got {p!r}")
        check.number(name, "margin", margin)

    def gradients(self, grad, needs, operands, results):
        return (self.backward(grad, *operands),)


_multi_margin_loss = MultiMarginLoss(NAME, _forward, _backward, define)


@_multi_margin_loss.public(
    "(Tensor input, Tensor target, *, int p=1, float margin=1.0, Tensor? weight=None, Tensor? mask=None, "
    'str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS_BY_CLASS,
)
def multi_margin_loss(
    input, target, *, p=1, margin=1.0, weight=None, mask=None, reduction="mean", denominator=None, empty="zero"
):
    """The mean over the classes j of weight[y] max(margin - x_y + x_j, 0)^p, where y is the row's class and j is not.

    Then the mean over the kept rows. As `torch.nn.functional.multi_margin_loss`, which knows no half on the CPU.

    Args:
        input: floating tensor (..., C), a score for each class in each row.
        target: tensor (...) of class indices, integers from 0 to C - 1.
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
    rows = vectors(NAME, input=input)
    one_a_row(NAME, "target", target, input, rows)
    if target.is_floating_point() or target.dtype == torch.bool:
        raise TypeError(f"{NAME}: target must be class indices, integers, got {target.dtype}")
    classes = input.shape[-1]
    validate_class_weight(NAME, weight, input)
    validate(NAME, rows, mask, None, reduction, denominator, empty, input=input, target=target)
    check.same_device(NAME, "input", input, weight=weight)
    _multi_margin_loss.validate_options(NAME, reduction, empty, p, margin)
    keep = kept(mask, None)
    index = target.long() if keep is None else torch.where(keep, target, 0).long()
    if classes:
        refuse_missing_class(NAME, target, mask, None, classes, "input", input.shape)
    inside = check.in_range(index, classes, True)
    keep = inside if keep is None else keep & inside
    place, w = torch.where(keep, index, -1), None
    if weight is not None:
        w = weight.to(compute_dtype(input.dtype, weight.dtype)).expand(*rows, classes)
        w = torch.where(own_class(torch.where(inside, index, 0), w), w, 0).sum(-1)
        place = torch.where(w == 0, -1, place)
    loss = _multi_margin_loss.call(input, place, margin, int(p))
    if weight is None:  # (the loss of a row that does not exist is 0)
        return loss_reduction.reduce(NAME, loss, keep.expand(rows), None, reduction, denominator, empty)
    return finish(NAME, (loss * w).to(loss.dtype), keep, None, reduction, denominator, empty)

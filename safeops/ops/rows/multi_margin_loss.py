"""multi_margin_loss: the score of a row's class is to be above those of the others, by a margin."""

import torch

from safeops import _check, _loss
from safeops._dtypes import compute_dtype
from safeops._op import Composed, registry
from safeops._symbolic import as_operand
from safeops.ops.reductions import masked_mean  # noqa: F401  (the records it is made of)
from safeops.ops.rows._classification import refuse_missing_class
from safeops.ops.rows._row_loss import (
    ARGUMENTS_BY_CLASS,
    finish,
    hinge,
    one_a_row,
    select,
    validate,
    validate_class_weight,
    vectors,
)

NAME = "multi_margin_loss"


def validate_options(name, reduction, empty, p, margin):
    _loss.validate_options(name, reduction, empty)
    if not _check.is_number(p) or p not in (1, 2):
        raise ValueError(f"{name}: p must be 1 or 2, got {p!r}")
    _check.number(name, "margin", margin)


_multi_margin_loss = Composed(
    NAME,
    "masked_mean",
    "masked_sum",
    "masked_count",
    module="MultiMarginLoss",
    buffers=("weight",),
    example="torch.eye(2), torch.tensor([0, 1])",
    validate_options=validate_options,
)


def _of_class(x, own, keepdim):
    """The number of each row's own class."""
    return registry["masked_sum"].call(x, own, -1, keepdim, None, None, "zero")


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
        IndexError: on the CPU, a class index of a kept row out of range. On CUDA such a row does not exist.

    Example:
        >>> input = torch.tensor([[0.1, 0.2, 0.4, 0.8]])
        >>> safeops.multi_margin_loss(input, torch.tensor([3]))
        tensor(0.3250)
    """
    rows = vectors(NAME, input=input)
    one_a_row(NAME, "target", target, rows)
    if target.is_floating_point() or target.dtype == torch.bool:
        raise TypeError(f"{NAME}: target must be class indices, integers, got {target.dtype}")
    classes = input.shape[-1]
    validate_class_weight(NAME, weight, input)
    validate(NAME, rows, mask, None, reduction, denominator, empty, input=input, target=target)
    _check.same_device(NAME, "input", input, weight=weight)
    validate_options(NAME, reduction, empty, p, margin)
    keep, (x,) = select(mask, None, input)
    index = target.long() if keep is None else torch.where(keep, target, 0).long()
    if classes:
        refuse_missing_class(NAME, target, mask, None, classes, "input", input.shape)
    inside = _check.in_range(index, classes, torch.ones((), dtype=torch.bool, device=index.device))
    keep = inside if keep is None else keep & inside
    index = torch.where(inside, index, 0)
    compute = compute_dtype(x.dtype)
    x = torch.where(inside.unsqueeze(-1), x, 0).to(compute)
    # (no arange, beside which a DTensor would be a stranger)
    own = index.unsqueeze(-1) == x.new_ones(classes, dtype=torch.int64).cumsum(0) - 1  # (..., C)
    if weight is not None:
        w = _of_class(weight.to(compute_dtype(compute, weight.dtype)).expand(*rows, classes), own, False)
        x = torch.where((w == 0).unsqueeze(-1), 0, x)  # select before arithmetic
    d = hinge(as_operand(margin, x) - _of_class(x, own, True) + x)
    d = torch.where(own, 0, d * d if p == 2 else d)
    loss = registry["masked_mean"].call(d, None, -1, False, None, None, "zero")
    if weight is not None:
        loss = (loss * w).to(compute)
    return finish(NAME, loss, keep, None, reduction, denominator, empty)

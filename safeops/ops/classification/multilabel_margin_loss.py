"""multilabel_margin_loss: the scores of a row's classes should exceed those of all others by 1."""

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, validate, vectors
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.classification._classification import refuse_missing_class

NAME = "multilabel_margin_loss"

# ---- definition


def losses(x, target, listed):
    """The loss of each row, in fp64. x: (..., C). listed: bool (..., C), True where `target` is one of a row's classes.

    (1) A row with k classes j and C - k others i has k (C - k) hinges max(0, 1 - x_j + x_i), above 0 if x_i > x_j - 1.
    (2) loss = (sum_i below_i x_i - sum_j above_j (x_j - 1)) / C, with below_i and above_j the numbers of positive
        hinges that contain x_i and x_j. The derivative takes them as constants.
    (3) Searches in sorted scores give below and above in C log C steps.
    """
    classes = x.shape[-1]
    place = torch.where(listed, target, classes)  # targets that are not listed go to a class C
    own = listed.new_zeros(*x.shape[:-1], classes + 1).scatter(-1, place, True)[..., :classes]
    wide = x.to(torch.float64)
    score = wide.gather(-1, torch.where(listed, target, 0)) - 1  # (..., C), of the listed classes
    fixed, low = (torch.where(t.isnan(), 0, t).detach() for t in (wide, score))
    others = torch.where(own, -torch.inf, fixed)
    above = classes - torch.searchsorted(others.sort(-1).values, low.contiguous(), right=True)
    above = torch.where(listed, above, 0)
    below = torch.searchsorted(torch.where(listed, low, torch.inf).sort(-1).values, fixed.contiguous())
    below = torch.where(own, 0, below)
    terms = torch.where(below > 0, wide, 0) * below - torch.where(above > 0, score, 0) * above
    loss = sums.total(terms, dim=-1) / max(classes, 1)
    # The loss is NaN for a NaN, and if the row's classes and the others have the same infinity: no order exists.
    one_of_each = listed.any(-1) & ~own.all(-1)
    lost = wide.isnan().any(-1) & one_of_each
    for end in (torch.inf, -torch.inf):
        lost = lost | ((fixed == end) & own).any(-1) & ((fixed == end) & ~own).any(-1)
    lost = lost.unsqueeze(-1)
    return loss + (torch.where(lost, wide, 0) * torch.where(lost, torch.nan, 0.0)).sum(-1)


# ---- record

_multilabel_margin_loss = Composed(
    NAME,
    *sums.ALL,
    module="MultiLabelMarginLoss",
    example="torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 1.0]]), torch.tensor([[0, -1, 0], [1, 2, -1]])",
    validate_options=loss_reduction.validate_options,
)

# ---- public function


@_multilabel_margin_loss.public(
    '(Tensor input, Tensor target, *, Tensor? mask=None, Tensor? weight=None, str reduction="mean", '
    'Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def multilabel_margin_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """sum_j sum_i max(0, 1 - x_j + x_i) / C of each row, j its classes and i all others; the mean over the kept rows.

    As `torch.nn.functional.multilabel_margin_loss`, which supports neither half nor second derivatives, and hides NaN.

    Args:
        input: floating tensor (..., C), a score x for each class in each row.
        target: tensor of `input`'s shape, integers: a row's classes, from 0 to C - 1, up to the first negative number.
        {arguments}

    Raises:
        TypeError: `input` is not floating, `target` not of integers, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`.
        IndexError: on the CPU, a class of a kept row out of range. On CUDA, and where the call is compiled, such a
            class is not listed.

    Example:
        >>> input, target = torch.tensor([[0.1, 0.2, 0.4, 0.8]]), torch.tensor([[3, 0, -1, 1]])
        >>> safeops.multilabel_margin_loss(input, target)
        tensor(0.8500)
    """
    if extra or unknown:
        refuse(multilabel_margin_loss, extra, unknown)
    check.tensor(NAME, "target", target)
    if isinstance(input, torch.Tensor) and input.dim() == 0 and target.dim() == 0:  # as torch's: one class
        input, target = input.reshape(1), target.reshape(1)
    rows = vectors(NAME, input=input)
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise TypeError(f"{NAME}: target must be class indices, integers, got {target.dtype}")
    if target.shape != input.shape:
        raise ValueError(f"{NAME}: target {check.shown(target)} must have the shape of input {check.shown(input)}")
    check.no_dtensor(NAME, "input", input)
    validate(NAME, rows, mask, weight, reduction, denominator, empty, input=input, target=target)
    keep, target = kept(mask, weight), target.long()
    listed = (target >= 0).cumprod(-1) != 0
    if keep is not None:
        listed = listed & keep.expand(rows).unsqueeze(-1)
        input = torch.where(keep.unsqueeze(-1), input, 0)  # select before arithmetic: NaN * 0 is NaN
    refuse_missing_class(NAME, target, listed, None, input.shape[-1], "input", input.shape)
    listed = listed & check.in_range(target, input.shape[-1], listed)
    loss = losses(input, target, listed).to(compute_dtype(input.dtype))
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)

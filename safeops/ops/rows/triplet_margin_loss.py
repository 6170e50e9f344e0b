"""triplet_margin_loss: an anchor is to be nearer to a positive than to a negative, by a margin."""

import torch

from safeops import _check, _loss
from safeops._dtypes import compute_dtype
from safeops._op import Composed, registry
from safeops._symbolic import as_operand
from safeops.ops.reductions import masked_norm  # noqa: F401  (the record it is made of)
from safeops.ops.rows._row_loss import ARGUMENTS, finish, hinge, select, validate, vectors

NAME = "triplet_margin_loss"


def validate_options(name, reduction, empty, margin, p, eps, swap):
    _loss.validate_options(name, reduction, empty)
    _check.number(name, "margin", margin, above=0)
    _check.number(name, "p", p, above=0)
    _check.number(name, "eps", eps, minimum=0)
    _check.boolean_flag(name, "swap", swap)


_triplet_margin_loss = Composed(
    NAME,
    "masked_norm",
    "masked_mean",
    "masked_sum",
    "masked_count",
    module="TripletMarginLoss",
    example="torch.eye(2), torch.ones(2, 2), torch.zeros(2, 2)",
    validate_options=validate_options,
)


def _distance(x, y, p, eps):
    """|x - y + eps| of each row, as torch's; and of equal vectors 0, with gradient 0."""
    norm = registry["masked_norm"].call((x - y).add_(eps), None, -1, False, None, None, "zero", p)
    return torch.where((x != y).any(-1) | norm.isnan(), norm, 0)  # (inf less inf is NaN)


@_triplet_margin_loss.public(
    "(Tensor anchor, Tensor positive, Tensor negative, *, Tensor? mask=None, Tensor? weight=None, "
    'str reduction="mean", Tensor? denominator=None, str empty="zero", float margin=1.0, float p=2.0, '
    "float eps=1e-6, bool swap=False) -> Tensor",
    arguments=ARGUMENTS,
)
def triplet_margin_loss(
    anchor, positive, negative, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
    margin=1.0, p=2.0, eps=1e-6, swap=False,
):  # fmt: skip
    """max(|anchor - positive| - |anchor - negative| + margin, 0) for each row; the mean over the kept rows.

    As `torch.nn.functional.triplet_margin_loss`, in fp32 where that subtracts, squares and sums halves. The distance of
    equal vectors is 0 with gradient 0 (torch's is the length of a vector of `eps`, with a gradient that pushes the two
    apart along it). Balntas et al., "Learning local feature descriptors with triplets", 2016.

    Args:
        anchor: floating tensor (..., D), a vector along the last dim for each row.
        positive: floating tensor of `anchor`'s shape.
        negative: floating tensor of `anchor`'s shape.
        margin: number greater than 0.
        p: order of the norm, greater than 0; other orders than 1, 2 and inf run as plain torch operations.
        eps: number that is added to each difference, at least 0: torch's, in fp32.
        swap: whether the distance of positive and negative counts, where it is less than that of the anchor and the
            negative.
        {arguments}

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, a number out of range.

    Example:
        >>> anchor, far = torch.zeros(2, 2), torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> safeops.triplet_margin_loss(anchor, anchor, far, reduction="none", eps=0.0)
        tensor([0.0000, 0.5000])
    """
    operands = {"anchor": anchor, "positive": positive, "negative": negative}
    rows = vectors(NAME, **operands)
    validate(NAME, rows, mask, weight, reduction, denominator, empty, **operands)
    validate_options(NAME, reduction, empty, margin, p, eps, swap)
    keep, (a, b, c) = select(mask, weight, anchor, positive, negative)
    compute = compute_dtype(a.dtype, b.dtype, c.dtype)
    a, b, c = a.to(compute), b.to(compute), c.to(compute)
    eps, margin = as_operand(eps, a), as_operand(margin, a)
    near, far = _distance(a, b, p, eps), _distance(a, c, p, eps)
    if swap:
        far = torch.minimum(far, _distance(b, c, p, eps))
    return finish(NAME, hinge(near - far + margin), keep, weight, reduction, denominator, empty)

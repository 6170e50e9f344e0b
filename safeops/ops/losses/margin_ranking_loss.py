"""margin_ranking_loss: one of two scores should exceed the other by a margin; the target says which."""

import torch

from safeops.core.domain import any_number, side
from safeops.core.dtypes import LARGEST
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import Parameter, TernaryLoss


def value(x1, x2, y, margin):
    flat = margin - y * (x1 - x2) <= 0
    y, x1, x2 = (torch.where(flat, 0, x) for x in (y, x1, x2))
    return torch.where(flat, 0, margin - y * (x1 - x2))


_margin_ranking_loss = TernaryLoss(
    "margin_ranking_loss",
    "MarginRankingLoss",
    value,
    Parameter("margin", 0.0, minimum=-LARGEST, sample=0.5),
    domain=(any_number, any_number, side),
    names=("input1", "input2", "target"),
    example="torch.tensor([0.5, 3.0]), torch.zeros(2), torch.tensor([1.0, -1.0])",
)


@_margin_ranking_loss.public(operands="")
def margin_ranking_loss(
    input1, input2, target, margin=0.0, *extra, mask=None, weight=None, reduction="mean", denominator=None,
    empty="zero", **unknown,
):  # fmt: skip
    """max(margin - y (x1 - x2), 0): x1 should be larger where y = 1, x2 where y = -1; the mean over the kept elements.

    Args:
        input1: floating tensor x1.
        input2: floating tensor x2 of `input1`'s shape; broadcast with a warning.
        target: floating tensor y, broadcastable with them: 1 or -1. Differentiable.
        margin: by how much. Where it is just reached the slope is 0, so equal scores have a gradient only if it is
            above 0.
        {arguments}

    Example:
        >>> x1, x2 = torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0])
        >>> safeops.margin_ranking_loss(x1, x2, torch.ones(2), margin=0.5, reduction="none")
        tensor([0.0000, 1.5000])
    """
    if extra or unknown:
        refuse(margin_ranking_loss, extra, unknown)
    return _margin_ranking_loss.call(input1, input2, target, mask, weight, reduction, denominator, empty, margin)

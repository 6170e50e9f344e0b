"""hinge_embedding_loss: a distance x where the target is 1, max(margin - x, 0) where it is -1."""

import torch

from safeops.core.domain import any_number, side
from safeops.core.dtypes import LARGEST
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import Parameter, PointwiseLoss


def value(x, y, margin):
    lack = margin - x
    real = y.isfinite()
    shown = torch.where(real, torch.where(real, 0, y), torch.nan)  # NaN where y is inf or NaN
    return torch.where(y == -1, 0, x) + torch.where((y == 1) | (lack <= 0), 0, lack) + shown


_hinge_embedding_loss = PointwiseLoss(
    "hinge_embedding_loss",
    "HingeEmbeddingLoss",
    value,
    Parameter("margin", 1.0, minimum=-LARGEST, sample=1.25),
    domain=(any_number, side),
)


@_hinge_embedding_loss.public(operands="")
def hinge_embedding_loss(
    input, target, margin=1.0, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
    **unknown,
):  # fmt: skip
    """x where the target is 1, max(margin - x, 0) where it is -1; the mean over the kept elements.

    Args:
        input: floating tensor, distances x.
        target: floating tensor of `input`'s shape: 1 (alike) or -1; broadcast with a warning. Its gradient is 0. For
            any other number both terms are added, as in torch.
        margin: the distance that is far enough.
        {arguments}

    Example:
        >>> x = torch.tensor([0.25, 0.25, 3.0])
        >>> safeops.hinge_embedding_loss(x, torch.tensor([1.0, -1.0, -1.0]), reduction="none")
        tensor([0.2500, 0.7500, 0.0000])
    """
    if extra or unknown:
        refuse(hinge_embedding_loss, extra, unknown)
    return _hinge_embedding_loss.call(input, target, mask, weight, reduction, denominator, empty, margin)

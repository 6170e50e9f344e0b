"""soft_margin_loss: the logistic loss of targets -1 and 1."""

import torch

from safeops.core.definitions import softplus
from safeops.core.domain import any_number, side
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import PointwiseLoss


def value(x, y):
    far = y * x == torch.inf  # the loss and its gradient are 0 there
    return torch.where(far, 0, softplus(-torch.where(far, 0, y) * torch.where(far, 0, x)))


_soft_margin_loss = PointwiseLoss("soft_margin_loss", "SoftMarginLoss", value, domain=(any_number, side))


@_soft_margin_loss.public(operands="")
def soft_margin_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """Logistic loss log(1 + e^(-y x)) of targets -1 and 1, which does not overflow; the mean over the kept elements.

    Args:
        input: floating tensor, the scores x.
        target: floating tensor of `input`'s shape, y: -1 or 1; broadcast with a warning. Differentiable.
        {arguments}

    Example:
        >>> safeops.soft_margin_loss(torch.tensor([0.0, -1e4]), torch.tensor([1.0, 1.0]), reduction="none")
        tensor([6.9315e-01, 1.0000e+04])
    """
    if extra or unknown:
        refuse(soft_margin_loss, extra, unknown)
    return _soft_margin_loss.call(input, target, mask, weight, reduction, denominator, empty)

"""charbonnier_loss: the smooth absolute error, sqrt((input - target)^2 + eps^2)."""

import torch

from safeops.core.definitions import absolute
from safeops.core.dtypes import SMALLEST, filled
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import Parameter, PointwiseLoss


def value(x, y, eps):
    d = x - y
    far = d.isinf()  # for an infinite d the derivative of hypot would be inf / inf
    return torch.where(far, absolute(d), torch.hypot(torch.where(far, 0, d), filled(d, (), eps)))


_charbonnier_loss = PointwiseLoss(
    "charbonnier_loss", "CharbonnierLoss", value, Parameter("eps", 1e-3, minimum=SMALLEST, sample=0.5)
)


@_charbonnier_loss.public()
def charbonnier_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", eps=1e-3,
    **unknown,
):  # fmt: skip
    """Charbonnier loss: sqrt((input - target)^2 + eps^2), a smooth absolute error; the mean over the kept elements.

    Charbonnier et al., "Two Deterministic Half-Quadratic Regularization Algorithms for Computed Imaging", 1994.

    Args:
        eps: the loss at a difference of 0: a normal number of fp32, 1.2e-38 to 3.4e38.
        {arguments}

    Example:
        >>> safeops.charbonnier_loss(torch.tensor([0.0, 3.0]), torch.zeros(2), eps=4.0, reduction="none")
        tensor([4., 5.])
    """
    if extra or unknown:
        refuse(charbonnier_loss, extra, unknown)
    return _charbonnier_loss.call(input, target, mask, weight, reduction, denominator, empty, eps)

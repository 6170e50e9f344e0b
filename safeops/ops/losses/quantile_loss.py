"""quantile_loss: the pinball loss, in which too high and too low have different prices."""

import torch

from safeops.core.definitions import magnitude
from safeops.ops.losses._pointwise import Parameter, PointwiseLoss


def value(x, y, quantile):
    d = x - y
    a = magnitude(d)
    terms = (1 - quantile, torch.where(d > 0, a, 0)), (quantile, torch.where(d > 0, 0, a))
    # A factor of 0 counts nothing, not even an infinite difference.
    return sum(factor * torch.where(part.isinf() & (factor == 0), 0, part) for factor, part in terms)


_quantile_loss = PointwiseLoss(
    "quantile_loss", "QuantileLoss", value, Parameter("quantile", 0.5, minimum=0, maximum=1, sample=0.75)
)


@_quantile_loss.public()
def quantile_loss(
    input, target, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", quantile=0.5
):
    """Pinball loss: quantile |d| where d = input - target < 0, (1 - quantile) d above; the mean over the kept elements.

    Its minimum is the quantile of the target: with 0.9, nine of ten targets lie below it. 0.5 is half of `l1_loss`.
    The derivative at 0 is 0. Koenker and Bassett, "Regression Quantiles", 1978.

    Args:
        quantile: which quantile of the target to predict, from 0 to 1.
        {arguments}

    Example:
        >>> safeops.quantile_loss(torch.tensor([1.0, -1.0]), torch.zeros(2), quantile=0.75, reduction="none")
        tensor([0.2500, 0.7500])
    """
    return _quantile_loss.call(input, target, mask, weight, reduction, denominator, empty, quantile)

"""masked_rms: the root of the mean square of the kept elements."""

import torch

from safeops.core.foreign import refuse
from safeops.ops.reductions._statistic import LINEAR, Statistic, reciprocal, root


def _define(k, parameter):
    binade = k.binade()
    x = k.x / binade
    total = k.sum(x * k.weighted(x))
    weight = k.total_weight(total)
    value = binade * root(total / torch.where(k.count > 0, weight, 1))
    return value, torch.zeros_like(value), reciprocal(value * weight)


def _part(value, origin, scale, parameter):
    return {"x": value}


_masked_rms = Statistic("masked_rms", _define, LINEAR, file="masked_norm", part=_part, weighs=True)


@_masked_rms.public()
def masked_rms(input, mask=None, dim=None, *extra, keepdim=False, weight=None, dtype=None, empty="zero", **unknown):
    """sqrt(sum(weight * input^2) / sum(weight)) over the kept elements.

    It replaces `x[mask].square().mean().sqrt()`. The squares neither overflow nor underflow where the result does not,
    and where every kept element is 0 the gradient is 0 (that of a bare `sqrt` is NaN).

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([3e30, 4e30, torch.nan, 0.0])
        >>> safeops.masked_rms(x, x > 0)
        tensor(3.5355e+30)
    """
    if extra or unknown:
        refuse(masked_rms, extra, unknown)
    return _masked_rms.call(input, mask, dim, keepdim, weight, dtype, empty)

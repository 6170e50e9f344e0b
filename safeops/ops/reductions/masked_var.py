"""masked_var: the variance of the kept elements."""

import torch

from safeops.core.foreign import refuse
from safeops.ops.reductions._statistic import LINEAR, Kept, Statistic


def deviations(k, x, correction, unit=1):
    """(sum of the squared deviations from the mean, mean, divisor, exists) of x, two passes; the divisor is 1 where
    there is no variance: nothing kept, or too little for the correction."""
    if k.weight is not None:
        k.weight = torch.where(k.weight < 0, float("nan"), k.weight)  # no frequency
    total = k.sum(k.weighted(x))
    weight = k.total_weight(total)
    mean = total / torch.where(k.count > 0, weight, 1)
    # Equal elements have deviations of exactly 0, however the division rounds: a root of less has a gradient of noise.
    largest, smallest = k.largest(x), -k.largest(-x)
    mean = mean + torch.where(largest == smallest, largest - mean, 0).detach()
    d = k.select(x - mean, 0)
    squares = k.squares(d, unit)
    exists = (k.count > 0) & ~((weight - correction <= 0) & ~squares.isnan())  # what is not finite shows
    return squares, mean, torch.where(exists, weight - correction, 1), exists


class Spread(Statistic):
    """A statistic that needs more weight than its correction."""

    def __init__(self, name, definition, file=None):
        super().__init__(name, definition, LINEAR, "correction", file, _part, weighs=True)

    def _exists(self, input, mask, weight, dims, correction):
        k = Kept(input, mask, weight, dims, torch.float64)
        return deviations(k, k.x, correction)[3]


def _part(value, origin, scale, *correction):
    return {"x": origin, "spread": value}


def _define(k, correction):
    squares, mean, divisor, exists = deviations(k, k.x, correction)
    return squares / divisor, mean, 2 / divisor, exists


_masked_var = Spread("masked_var", _define)


@_masked_var.public(parameter="Scalar correction=1, ")
def masked_var(
    input, mask=None, dim=None, *extra, correction=1, keepdim=False, weight=None, dtype=None, empty="zero", **unknown,
):  # fmt: skip
    """sum(weight * (input - mean)^2) / (sum(weight) - correction) over the kept elements.

    The replacement of `x[mask].var()` and `torch.masked.var`. Half is computed in fp32, around the mean: the digits
    that `E[x^2] - E[x]^2` loses where the mean is large are kept. Weights count as frequencies;
    a negative one makes the result NaN.

    Args:
        correction: number taken from the divisor: 1 for the variance of a sample, 0 for that of a population. Where
            that leaves nothing to divide by (a single element, say), there is no variance: see `empty`.
        {arguments}

    Example:
        >>> x = torch.tensor([1001.0, 1002.0, 1003.0, torch.nan])
        >>> safeops.masked_var(x, x.isfinite())
        tensor(1.)
        >>> safeops.masked_var(torch.tensor([5.0]))
        tensor(0.)
    """
    if extra or unknown:
        refuse(masked_var, extra, unknown)
    return _masked_var.call(input, mask, dim, keepdim, weight, dtype, empty, correction)

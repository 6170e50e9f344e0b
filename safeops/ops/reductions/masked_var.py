"""masked_var: the variance of the kept elements."""

import torch

from safeops.core.foreign import refuse
from safeops.ops.reductions._statistic import LINEAR, Kept, Statistic


def deviations(k, x, correction, unit=1):
    """Returns (sum of the squared deviations from the mean, mean, divisor, exists) of x, in two passes. divisor: the
    sum of weights minus the correction. exists: False where it is not above 0 or nothing is kept; divisor is then 1."""
    if k.weight is not None:
        k.weight = torch.where(k.weight < 0, float("nan"), k.weight)  # weights are frequencies: not negative
    total = k.sum(k.weighted(x))
    weight = k.total_weight(total)
    mean = total / torch.where(k.count > 0, weight, 1)
    # If all elements are equal, the mean is set to them, so that rounding leaves no deviation: the gradient of the root
    # of a rounding error would be huge.
    largest, smallest = k.largest(x), -k.largest(-x)
    mean = mean + torch.where(largest == smallest, largest - mean, 0).detach()
    d = k.select(x - mean, 0)
    squares = k.squares(d, unit)
    exists = (k.count > 0) & ~((weight - correction <= 0) & ~squares.isnan())  # NaN squares exist: the result is NaN
    return squares, mean, torch.where(exists, weight - correction, 1), exists


class Spread(Statistic):
    """The record of masked_var or masked_std, which exist where the sum of weights exceeds the correction."""

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

    It replaces `x[mask].var()` and `torch.masked.var`. Half is computed in fp32, from differences to the mean: where
    the mean is large, `E[x^2] - E[x]^2` would lose digits. Weights count as frequencies; a negative one makes the
    result NaN.

    Args:
        correction: number subtracted from the divisor: 1 for the variance of a sample, 0 for that of a population. If
            the divisor is then not above 0 (as for a single element), there is no variance: see `empty`.
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

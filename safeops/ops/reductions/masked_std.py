"""masked_std: the standard deviation of the kept elements."""

from safeops.core.foreign import refuse
from safeops.ops.reductions._statistic import reciprocal, root
from safeops.ops.reductions.masked_var import Spread, deviations


def _define(k, correction):
    binade = k.binade()
    squares, mean, divisor, exists = deviations(k, k.x / binade, correction, binade)
    value = binade * root(squares / divisor)
    return value, binade * mean, reciprocal(value * divisor), exists


_masked_std = Spread("masked_std", _define, file="masked_var")
# A rank computes its part's standard deviation with correction 0 (it does not overflow); all parts get the correction.
Spread.of_part = _masked_std, 0.0


@_masked_std.public(parameter="Scalar correction=1, ")
def masked_std(
    input, mask=None, dim=None, *extra, correction=1, keepdim=False, weight=None, dtype=None, empty="zero", **unknown,
):  # fmt: skip
    """sqrt(sum(weight * (input - mean)^2) / (sum(weight) - correction)) over the kept elements.

    The root of `masked_var`, whose squares neither overflow nor underflow. Where all kept elements are equal the
    deviation is 0, and so is the gradient (that of `x.var().sqrt()` is NaN there). A negative weight makes it NaN.

    Args:
        correction: number subtracted from the divisor: 1 for the deviation of a sample, 0 for that of a population. If
            the divisor is then not above 0 (as for a single element), there is no deviation: see `empty`.
        {arguments}

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0, torch.nan])
        >>> safeops.masked_std(x, x.isfinite())
        tensor(1.)
    """
    if extra or unknown:
        refuse(masked_std, extra, unknown)
    return _masked_std.call(input, mask, dim, keepdim, weight, dtype, empty, correction)

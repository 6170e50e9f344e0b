"""masked_amax: the largest of the kept elements."""

from safeops.core.foreign import refuse
from safeops.ops.reductions._statistic import EQUAL, Statistic, pick


def _define(k, parameter):
    value, ties = pick(k, k.x, k.largest(k.x))
    return value, value, 1 / ties


_masked_amax = Statistic("masked_amax", _define, EQUAL)


@_masked_amax.public()
def masked_amax(input, mask=None, dim=None, *extra, keepdim=False, weight=None, dtype=None, empty="zero", **unknown):
    """The largest kept element of `input`. A kept NaN shows.

    It replaces `x[mask].amax()`, and `x.masked_fill(~mask, -inf).amax()`, which is -inf where nothing is kept. As in
    torch, equal largest elements share the gradient evenly. A weight of 0 masks its element out; any other weight
    changes nothing.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([[1.0, 7.0, 3.0], [4.0, 5.0, 6.0]])
        >>> safeops.masked_amax(x, x < 4, dim=1)
        tensor([3., 0.])
    """
    if extra or unknown:
        refuse(masked_amax, extra, unknown)
    return _masked_amax.call(input, mask, dim, keepdim, weight, dtype, empty)

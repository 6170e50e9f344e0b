"""masked_amin: the smallest of the kept elements."""

from safeops.core.foreign import refuse
from safeops.ops.reductions._statistic import EQUAL, Statistic, pick


def _define(k, parameter):
    value, ties = pick(k, k.x, -k.largest(-k.x))
    return value, value, 1 / ties


_masked_amin = Statistic("masked_amin", _define, EQUAL, file="masked_amax")


@_masked_amin.public()
def masked_amin(input, mask=None, dim=None, *extra, keepdim=False, weight=None, dtype=None, empty="zero", **unknown):
    """The smallest kept element of `input`. A kept NaN shows.

    It replaces `x[mask].amin()`, and `x.masked_fill(~mask, inf).amin()`, which is inf where nothing is kept. As in
    torch, equal smallest elements share the gradient evenly. A weight of 0 masks its element out; any other weight
    changes nothing.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([[1.0, 7.0, 3.0], [4.0, 5.0, 6.0]])
        >>> safeops.masked_amin(x, x > 3, dim=1)
        tensor([7., 4.])
    """
    if extra or unknown:
        refuse(masked_amin, extra, unknown)
    return _masked_amin.call(input, mask, dim, keepdim, weight, dtype, empty)

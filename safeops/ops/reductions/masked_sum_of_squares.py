"""masked_sum_of_squares: the sum of the squares of the kept elements."""

import torch

from safeops.core.foreign import refuse
from safeops.ops.reductions._statistic import LINEAR, Statistic


def _define(k, parameter):
    # x (w x), not w (x x): x^2 may overflow or underflow where w x^2 does not.
    value = k.sum(k.x * k.weighted(k.x))
    return value, torch.zeros_like(value), torch.full_like(value, 2)


def _part(value, origin, scale, parameter):
    return {"weight": value}


_masked_sum_of_squares = Statistic("masked_sum_of_squares", _define, LINEAR, file="masked_norm", part=_part)


@_masked_sum_of_squares.public()
def masked_sum_of_squares(
    input, mask=None, dim=None, *extra, keepdim=False, weight=None, dtype=None, empty="zero", **unknown,
):  # fmt: skip
    """sum(weight * input^2) over the kept elements.

    It replaces `x[mask].square().sum()` and `(x * mask).square().sum()`: half is squared and summed in fp32 (256^2 is
    inf in fp16), and masked-out elements change nothing.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([300.0, 400.0, torch.nan], dtype=torch.float16)
        >>> safeops.masked_sum_of_squares(x, x.isfinite())
        tensor(250000.)
    """
    if extra or unknown:
        refuse(masked_sum_of_squares, extra, unknown)
    return _masked_sum_of_squares.call(input, mask, dim, keepdim, weight, dtype, empty)

"""safe_pow: input ** exponent with a stand-in where there is no such real number, or it does not fit."""

import torch

from safeops._dtypes import largest_like
from safeops._library import declare_public
from safeops.ops._binary import Binary

# ---- definition


def _define(a, b, eps, fill_value, dtype):
    base, exponent = a.detach(), b.detach()
    none = (base < 0) & base.isfinite() & (exponent != exponent.trunc()) & ~exponent.isnan()
    value = torch.where(none, 1, base).pow(exponent)
    over = value.to(dtype).isinf() & base.isfinite() & exponent.isfinite() & ~none
    flat = (base == 0) & (exponent < 1)  # a slope that is infinite, or that of a constant
    instead = torch.where(none, 0, torch.where(over, largest_like(value, dtype), value))
    true = ~(none | over | flat)
    # Where the slope a^(b-1) alone overflows it must not meet a gradient of 0: a^b = value exp(b log|a| - itself).
    steep = true & base.isfinite() & (exponent * torch.where(true, base, 1).pow(exponent - 1)).isinf()
    rising = true & ~(base <= 0)  # elsewhere the exponent is an integer, or the power 0: it has no derivative
    b = torch.where(rising, b, exponent)

    def select(where):
        return torch.where(where, a, 1), torch.where(where, b, 1)

    x, y = select(steep)
    logarithm = y * x.abs().log()
    result = torch.where(steep, value, 1) * (logarithm - logarithm.detach()).exp()
    x, y = select(rising & ~steep)
    result = torch.where(rising & ~steep, x.pow(y), result)
    x, y = select(true & ~rising & ~steep)
    result = torch.where(true & ~rising & ~steep, x.pow(y.detach()), result)
    return torch.where(true, result.to(dtype), instead.to(dtype))


# ---- op

_safe_pow = Binary("safe_pow", _define, other="exponent")

# ---- public function


def safe_pow(input, exponent, *, dtype=None):
    """`input ** exponent`, finite for finite operands; no NaN or inf gradient comes from a power that has no slope.

    A negative base with an exponent that is no integer gives 0. A power that does not fit the output dtype, 0 to a
    negative one included, saturates at its largest finite value with the true sign. Both gradients are exactly 0 there.
    The gradient to a base of 0 is 0 where it would be infinite (exponents between 0 and 1), and the gradient to the
    exponent is 0 for bases up to 0. `0 ** 0` is 1. NaN and inf operands give what `torch.pow` gives.

    Args:
        input: floating (or integer) tensor: the base.
        exponent: tensor broadcastable with `input`, or a number.
        dtype: output dtype. None: the promoted input dtype, at least fp32 under autocast.

    Returns:
        A tensor of the broadcast shape of `input` and `exponent`.

    Raises:
        TypeError: an operand is no (real) tensor, dtype not floating.
        ValueError: shapes do not broadcast, devices differ.

    Example:
        >>> safeops.safe_pow(torch.tensor([-8.0, 0.0, 4.0]), 0.5)
        tensor([0., 0., 2.])
    """
    return _safe_pow.call(input, exponent, dtype=dtype)


declare_public(
    safe_pow,
    "safe_pow(Tensor input, Tensor exponent, *, ScalarType? dtype=None) -> Tensor",
    "safe_pow.Scalar(Tensor input, Scalar exponent, *, ScalarType? dtype=None) -> Tensor",
)

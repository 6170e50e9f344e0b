"""safe_pow: input ** exponent; 0 where there is no such real number, the largest number where it does not fit."""

import torch

from safeops.core.dtypes import largest_like, overflows, wide
from safeops.core.foreign import refuse
from safeops.ops.elementwise._binary import Binary
from safeops.ops.elementwise.safe_log import log

# ---- definition


def _define(a, b, eps, fill_value, dtype):
    a, b = wide(a), wide(b)
    base, exponent = a.detach(), b.detach()
    finite = base.isfinite() & exponent.isfinite()
    is_integer = exponent == exponent.trunc()
    none = finite & ~is_integer & (base < 0)
    value = torch.where(none, 1, base).pow(exponent)
    over = finite & ~none & overflows(value, dtype)
    flat = (base == 0) & ((exponent < 1) | (finite & ~is_integer))  # its lowest derivative other than 0 is infinite
    level = flat & (exponent > 1)  # the slope is 0, but as a factor: an upstream NaN shows
    instead = torch.where(none, 0, torch.where(over, largest_like(value, dtype), value))
    instead = torch.where(level, 0 * torch.where(level, a, 0), instead)
    true = ~(none | over | flat)
    rising = true & ~(base <= 0)  # elsewhere there is no derivative by the exponent
    # (-a)^b is a^b or -a^b, by the parity of b: torch's derivative needs that of b - 1, which rounds where b is large.
    negative = (base < 0) & ~exponent.isnan()
    sign = torch.where(negative & (exponent.fmod(2).abs() == 1), -1, 1)
    a, base = torch.where(negative, -a, a), torch.where(negative, -base, base)
    # A first or second derivative that overflows, where the value fits, must not be multiplied by a gradient of 0.
    # There a^b is written as value e^(d - d.detach()), with d = b log a.
    kept = torch.where(true, base, 1)
    power = kept.pow(exponent - 1)
    bent = (power / kept).isinf() & (value.abs() >= torch.finfo(value.dtype).tiny)
    still = true & finite & (exponent == 0)  # slope 0 by the base, which torch's form computes as 0 * inf
    steep = true & finite & ~still & ((exponent * power).isinf() | bent)
    tall = rising & finite & ~steep & ~still & (value * kept.log()).isinf()

    def operands(where):
        return torch.where(where, a, 1), torch.where(where & rising, b, torch.where(where, exponent, 1))

    x, y = operands(steep)
    logarithm = y * log(x)
    result = torch.where(steep, sign * value, 1) * (logarithm - logarithm.detach()).exp()
    # Only d/db overflows, not d/da. (The term of the mixed second derivative that is lost is 1, beside b log a > 80.)
    x, y = operands(tall)
    result = torch.where(tall, x.pow(y.detach()) * ((y - y.detach()) * x.detach().log()).exp(), result)
    x, y = operands(still)
    result = torch.where(still, ((y - y.detach()) * x.detach().log()).exp(), result)
    plain = rising & ~steep & ~tall & ~still
    x, y = operands(plain)
    result = torch.where(plain, x.pow(y), result)
    others = true & ~rising & ~steep & ~still
    x, y = operands(others)
    result = torch.where(others, x.pow(y.detach()), result)
    return torch.where(true, (sign * result).to(dtype), instead.to(dtype))


# ---- op

_safe_pow = Binary("safe_pow", _define, other="exponent")

# ---- public function


@_safe_pow.public(
    "(Tensor input, Tensor exponent, *, ScalarType? dtype=None) -> Tensor",
    ".Scalar(Tensor input, Scalar exponent, *, ScalarType? dtype=None) -> Tensor",
)
def safe_pow(input, exponent, *extra, dtype=None, **unknown):
    """`input ** exponent`, finite for finite operands; no NaN or inf gradient comes from a power that has no slope.

    A negative base with an exponent that is not an integer gives 0. A power that does not fit the output dtype (0 to a
    negative exponent, too) saturates at its largest finite value with the true sign. Both gradients are exactly 0
    there.

    The gradient of a base of 0 is 0 where it would be infinite (exponents between 0 and 1). The gradient of the
    exponent is 0 for bases of 0 and less. `0 ** 0` is 1. NaN and inf operands give what `torch.pow` gives.

    Args:
        input: floating (or integer) tensor: the base.
        exponent: tensor broadcastable with `input`, or a number.
        dtype: output dtype. None: the promoted input dtype (of integers: the default dtype), at least fp32 under
            autocast.

    Returns:
        A tensor of the broadcast shape of `input` and `exponent`.

    Raises:
        TypeError: an operand is not a real tensor, dtype is not floating.
        ValueError: shapes do not broadcast, devices differ.

    Example:
        >>> safeops.safe_pow(torch.tensor([-8.0, 0.0, 4.0]), 0.5)
        tensor([0., 0., 2.])
    """
    if extra or unknown:
        refuse(safe_pow, extra, unknown)
    return _safe_pow.call(input, exponent, None, 0.0, dtype)

"""safe_pow: input ** exponent; 0 where the power is not real, the dtype's largest number where it overflows."""

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
    flat = (base == 0) & ((exponent < 1) | (finite & ~is_integer))  # some derivative of 0^b is inf
    level = flat & (exponent > 1)  # the slope 0 is a factor of the upstream gradient, so that a NaN there shows
    instead = torch.where(none, 0, torch.where(over, largest_like(value, dtype), value))
    instead = torch.where(level, 0 * torch.where(level, a, 0), instead)
    true = ~(none | over | flat)
    rising = true & ~(base <= 0)  # only a positive base (or NaN) has a derivative by the exponent
    # (-a)^b is a^b for even b, -a^b for odd b. torch's derivative, b (-a)^(b - 1), would round a large b - 1.
    negative = (base < 0) & ~exponent.isnan()
    sign = torch.where(negative & (exponent.fmod(2).abs() == 1), -1, 1)
    a, base = torch.where(negative, -a, a), torch.where(negative, -base, base)
    # Where a^b fits but its first or second derivative by a overflows (`steep`), an inf would be multiplied by an
    # upstream gradient of 0. There a^b is written as value e^(d - d.detach()), with d = b log a.
    kept = torch.where(true, base, 1)
    power = kept.pow(exponent - 1)
    bent = (power / kept).isinf() & (value.abs() >= torch.finfo(value.dtype).tiny)
    still = true & finite & (exponent == 0)  # the slope by the base is 0; torch's derivative may compute 0 * inf
    steep = true & finite & ~still & ((exponent * power).isinf() | bent)
    tall = rising & finite & ~steep & ~still & (value * kept.log()).isinf()

    def operands(where):
        return torch.where(where, a, 1), torch.where(where & rising, b, torch.where(where, exponent, 1))

    x, y = operands(steep)
    logarithm = y * log(x)
    result = torch.where(steep, sign * value, 1) * (logarithm - logarithm.detach()).exp()
    # `tall`: only d/db overflows. (The mixed second derivative a^(b-1) (1 + b log a) loses the 1, as b log a > 80.)
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

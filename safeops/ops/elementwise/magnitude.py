"""magnitude: |z| of complex numbers, or of their two parts; without a slope at 0."""

import math

import torch

from safeops.core.dtypes import wide
from safeops.ops.elementwise._binary import Binary

# ---- definition


def _define(a, b, eps, fill_value, dtype):
    unknown = a.isnan() | b.isnan()
    origin, far = (a == 0) & (b == 0), (a.isinf() | b.isinf()) & ~unknown
    # If a part is infinite, its slope is its sign (with both infinite, times sqrt(1/2)); a finite part has slope 0.
    da, db = (torch.where(x.detach().isinf(), x.detach().sign(), 0) for x in (a, b))
    both = torch.where(da * db != 0, a.new_full((), math.sqrt(0.5)), 1)
    infinite = both * (da * torch.where(far, a, 0) + db * torch.where(far, b, 0))
    flat = origin | far | unknown
    x, y = wide(torch.where(flat, 1, a)), wide(torch.where(flat, 1, b))
    # (torch.hypot's backward multiplies g by x before it divides.) The scale, a power of two, keeps squares in range.
    info, longer = torch.finfo(x.dtype), torch.maximum(x.abs(), y.abs()).detach()
    root = info.tiny**-0.5
    scale = torch.where(longer < 1 / (root * info.eps), longer.new_full((), root / info.eps), 1)
    scale = torch.where(longer > root / 4, info.eps / root, scale)
    value = (((x * scale).square() + (y * scale).square()).sqrt() / scale).to(a.dtype)
    value = torch.where(unknown, torch.where(unknown, a + b, 0) * float("nan"), value)
    return torch.where(origin, 0, torch.where(far, infinite, value)).to(dtype)


# ---- op

_magnitude = Binary("magnitude", _define, number=False)

# ---- public function


@_magnitude.public("(Tensor input, Tensor? other=None) -> Tensor")
def magnitude(input, other=None):
    """sqrt(input^2 + other^2), or |input| of a complex tensor, with gradient 0 where both parts are 0.

    Written by hand, the gradient at 0 is 0 / 0, and squares overflow and underflow in half. Here no square does. An
    infinite part has the slope of its sign, and then the other part has slope 0. A NaN shows, also beside an inf.

    For spectral losses: `safeops.l1_loss(safeops.magnitude(stft(x)), safeops.magnitude(stft(y)))`.

    Args:
        input: complex tensor (alone), whose gradient is complex; or floating (or integer) tensor: one part.
        other: tensor broadcastable with `input`: the other part.

    Returns:
        A real tensor of the broadcast shape, of the operands' promoted dtype (of complex ones, that of their parts; of
        integers, the default dtype), at least fp32 under autocast. Half is computed in fp32.

    Raises:
        TypeError: an operand is not a tensor; `input` is complex and `other` given, or real and `other` missing.
        ValueError: shapes do not broadcast, devices differ.

    Example:
        >>> safeops.magnitude(torch.tensor([3 + 4j, 0j]))
        tensor([5., 0.])
    """
    if isinstance(input, torch.Tensor) and input.is_complex() and other is None:
        input, other = torch.view_as_real(input.resolve_conj()).unbind(-1)  # views of the parts
    return _magnitude.call(input, other)

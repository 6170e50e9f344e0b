"""safe_atan2: the angle of (other, input), 0 and without a slope at the origin."""

import torch

from safeops.core.dtypes import to_one, wide
from safeops.ops.elementwise._binary import Binary

# ---- definition


def _define(y, x, eps, fill_value, dtype):
    origin = (y == 0) & (x == 0)
    # With an infinite operand the result is constant: a multiple of pi/4, with gradient 0.
    far = (y.isinf() | x.isinf()) & ~(y.isnan() | x.isnan())
    flat = origin | far
    instead = torch.where(origin, 0, torch.atan2(y.detach(), x.detach()))
    y, x = torch.where(flat, 0, y), torch.where(flat, 1, x)
    y, x = wide(y), wide(x)
    # The scale, a power of two, brings max(|x|, |y|) near 1: the derivative divides by x^2 + y^2, which then fits.
    longer = torch.maximum(y.detach().abs(), x.detach().abs())
    scale = torch.where(longer.isnan(), 1, to_one(longer))
    return torch.where(flat, instead, torch.atan2(y * scale, x * scale)).to(dtype)


# ---- op

_safe_atan2 = Binary("safe_atan2", _define, number=False)

# ---- public function


@_safe_atan2.public("(Tensor input, Tensor other) -> Tensor")
def safe_atan2(input, other):
    """The angle of the point (x `other`, y `input`) in radians, as `torch.atan2`, and 0 at the origin.

    At the origin, whatever the signs of its zeros, both gradients are exactly 0. Elsewhere they are the true ones: the
    squares in them neither overflow nor underflow.

    Args:
        input: floating (or integer) tensor: y.
        other: tensor broadcastable with `input`: x.

    Returns:
        A tensor of the broadcast shape of `input` and `other`, in radians; of their promoted dtype (of integers: the
        default dtype), at least fp32 under autocast.

    Raises:
        TypeError: an operand is not a real tensor.
        ValueError: shapes do not broadcast, devices differ.

    Example:
        >>> safeops.safe_atan2(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 0.0]))
        tensor([0.0000, 1.5708])
    """
    return _safe_atan2.call(input, other)

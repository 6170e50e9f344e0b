"""safe_acos: the arc cosine of x clamped to [-1, 1]."""

import torch

from safeops.core.domain import cosine
from safeops.ops.elementwise._unary import Unary

_safe_acos = Unary(
    "safe_acos",
    # the derivative is -1 / sqrt((1 - x)(1 + x)); that of torch.acos, -1 / sqrt(1 - x^2), loses digits near the bounds
    lambda x: torch.atan2(((1 - x) * (1 + x)).sqrt(), x),
    absent=lambda x, eps: x.abs() >= 1,
    stand_in=lambda x, eps, fill_value: x.clamp(-1, 1).acos(),
    domain=(cosine,),
)

# ---- public function


@_safe_acos.public("(Tensor input) -> Tensor")
def safe_acos(input):
    """The arc cosine of `input` clamped to [-1, 1]; its gradient is exactly 0 at the bounds and beyond.

    A number that rounding brought just outside the bounds (such as the cosine of two equal directions) gets the angle
    of the bound. A NaN shows in the result.

    Args:
        input: floating (or integer) tensor.

    Returns:
        A tensor of `input`'s shape and dtype (of integers: the default dtype), at least fp32 under autocast.

    Raises:
        TypeError: `input` is not a real tensor.

    Example:
        >>> safeops.safe_acos(torch.tensor([1.0000001, 0.0]))
        tensor([0.0000, 1.5708])
    """
    return _safe_acos.call(input)

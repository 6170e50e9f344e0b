"""safe_acosh: the area hyperbolic cosine of max(x, 1)."""

import torch

from safeops.core.domain import at_least_one
from safeops.ops.elementwise._unary import Unary

_safe_acosh = Unary(
    "safe_acosh",
    # acosh(x) = 2 asinh(sqrt((x - 1) / 2)): unlike torch.acosh, value and derivative lose no digits near x = 1.
    # (abs: `_unary.define` also passes BENIGN, which is below 1)
    lambda x: 2 * torch.asinh(((x - 1).abs() / 2).sqrt()),
    absent=lambda x, eps: x <= 1,
    stand_in=lambda x, eps, fill_value: torch.zeros_like(x),
    domain=(at_least_one,),
)

# ---- public function


@_safe_acosh.public("(Tensor input) -> Tensor")
def safe_acosh(input):
    """The area hyperbolic cosine of `max(input, 1)`; its gradient is exactly 0 at 1 and below.

    A number that rounding brought just below 1 (for the distance of two equal points of hyperbolic space) gets 0. A
    NaN, and a positive inf, show in the result.

    Args:
        input: floating (or integer) tensor.

    Returns:
        A tensor of `input`'s shape and dtype (of integers: the default dtype), at least fp32 under autocast.

    Raises:
        TypeError: `input` is not a real tensor.

    Example:
        >>> safeops.safe_acosh(torch.tensor([0.9999999, 2.0]))
        tensor([0.0000, 1.3170])
    """
    return _safe_acosh.call(input)

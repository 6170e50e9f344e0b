"""safe_asin: the arc sine of x clamped to [-1, 1]."""

import torch

from safeops.core.domain import cosine
from safeops.ops.elementwise._unary import Unary

_safe_asin = Unary(
    "safe_asin",
    # the derivative is 1 / sqrt((1 - x)(1 + x)); that of torch.asin, 1 / sqrt(1 - x^2), loses digits near the bounds
    lambda x: torch.atan2(x, ((1 - x) * (1 + x)).sqrt()),
    absent=lambda x, eps: x.abs() >= 1,
    stand_in=lambda x, eps, fill_value: x.clamp(-1, 1).asin(),
    domain=(cosine,),
)

# ---- public function


@_safe_asin.public("(Tensor input) -> Tensor")
def safe_asin(input):
    """The arc sine of `input` clamped to [-1, 1]; its gradient is exactly 0 at the bounds and beyond.

    A NaN shows in the result.

    Args:
        input: floating (or integer) tensor.

    Returns:
        A tensor of `input`'s shape and dtype (of integers: the default dtype), at least fp32 under autocast.

    Raises:
        TypeError: `input` is not a real tensor.

    Example:
        >>> safeops.safe_asin(torch.tensor([1.0000001, 0.0]))
        tensor([1.5708, 0.0000])
    """
    return _safe_asin.call(input)

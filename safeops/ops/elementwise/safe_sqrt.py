"""safe_sqrt: the square root, 0 for negative numbers, with gradient 0 below eps."""

import torch

from safeops.core.foreign import refuse
from safeops.ops.elementwise._unary import Unary

_safe_sqrt = Unary(
    "safe_sqrt",
    torch.sqrt,
    absent=lambda x, eps: x < eps,
    stand_in=lambda x, eps, fill_value: torch.where(x > 0, x, 0).sqrt(),
)

# ---- public function


@_safe_sqrt.public("(Tensor input, *, float? eps=None, ScalarType? dtype=None) -> Tensor")
def safe_sqrt(input, *extra, eps=None, dtype=None, **unknown):
    """The square root, 0 for negative numbers; its gradient is exactly 0 below `eps`.

    So the gradient of a norm is 0, not NaN, at the zero vector. The value between 0 and `eps` is the true one. A NaN,
    and a positive inf, show in the result.

    Args:
        input: floating (or integer) tensor.
        eps: the least `input` with a gradient, at least 0; the value does not depend on it. None: the smallest normal
            number of the compute dtype (1.2e-38 in fp32, which half inputs use; 2.2e-308 in fp64). At 0 itself the
            gradient is always 0.
        dtype: output dtype. None: `input`'s (of integers: the default dtype), at least fp32 under autocast.

    Returns:
        A tensor of `input`'s shape.

    Raises:
        TypeError: `input` is not a real tensor, eps is not a number, dtype is not floating.
        ValueError: eps is negative.

    Example:
        >>> x = torch.zeros(3, requires_grad=True)
        >>> safeops.safe_sqrt(x.square().sum()).backward()
        >>> x.grad
        tensor([0., 0., 0.])
    """
    if extra or unknown:
        refuse(safe_sqrt, extra, unknown)
    return _safe_sqrt.call(input, eps, 0.0, dtype)

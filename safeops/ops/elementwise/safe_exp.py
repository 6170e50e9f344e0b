"""safe_exp: the exponential, which saturates."""

import torch

from safeops.core.foreign import refuse
from safeops.ops.elementwise._unary import Unary

_safe_exp = Unary(
    "safe_exp",
    torch.exp,
    absent=lambda x, eps: torch.zeros_like(x, dtype=torch.bool),
    stand_in=lambda x, eps, fill_value: x,
)

# ---- public function


@_safe_exp.public("(Tensor input, *, ScalarType? dtype=None) -> Tensor")
def safe_exp(input, *extra, dtype=None, **unknown):
    """The exponential, which saturates at the output dtype's largest finite value, with gradient 0 there.

    It does so above 11.1 in fp16, above 88.7 in bf16 and fp32, above 709.8 in fp64. A NaN or inf shows in the result.

    Args:
        input: floating (or integer) tensor.
        dtype: output dtype. None: `input`'s (of integers: the default dtype), at least fp32 under autocast.

    Returns:
        A tensor of `input`'s shape.

    Raises:
        TypeError: `input` is not a real tensor, dtype is not floating.

    Example:
        >>> safeops.safe_exp(torch.tensor([0.0, 1.0, 1000.0]))
        tensor([1.0000e+00, 2.7183e+00, 3.4028e+38])
    """
    if extra or unknown:
        refuse(safe_exp, extra, unknown)
    return _safe_exp.call(input, None, 0.0, dtype)

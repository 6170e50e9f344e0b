"""safe_rsqrt: 1 / sqrt(max(x, eps))."""

from safeops.core.dtypes import filled
from safeops.core.foreign import refuse
from safeops.ops.elementwise._unary import Unary, lift


def rsqrt(x):
    """1 / sqrt(x), as rsqrt(x s) sqrt(s) with `lift`: derivatives do not overflow for a tiny x."""
    lifted, s = lift(x)
    return lifted.rsqrt() * s.sqrt()


_safe_rsqrt = Unary(
    "safe_rsqrt",
    rsqrt,
    absent=lambda x, eps: x < eps,
    stand_in=lambda x, eps, fill_value: filled(x, (), eps).rsqrt(),
    positive=True,
)

# ---- public function


@_safe_rsqrt.public("(Tensor input, *, float? eps=None, ScalarType? dtype=None) -> Tensor")
def safe_rsqrt(input, *extra, eps=None, dtype=None, **unknown):
    """`1 / sqrt(max(input, eps))`, finite for finite input; its gradient is exactly 0 below `eps`.

    A value that does not fit the output dtype saturates at its largest finite one, with gradient 0: in fp16 that is so
    for an input below 2.3e-10, which is less than its smallest number. A NaN shows in the result.

    Args:
        input: floating (or integer) tensor.
        eps: the floor of `input`, greater than 0, never added to it. None: the smallest normal number of the compute
            dtype (1.2e-38 in fp32, which half inputs use; 2.2e-308 in fp64).
        dtype: output dtype. None: `input`'s (of integers: the default dtype), at least fp32 under autocast.

    Returns:
        A tensor of `input`'s shape.

    Raises:
        TypeError: `input` is not a real tensor, eps is not a number, dtype is not floating.
        ValueError: eps is not positive, or beyond fp32's largest number.

    Example:
        >>> safeops.safe_rsqrt(torch.tensor([4.0, 0.0]), eps=0.01)
        tensor([ 0.5000, 10.0000])
    """
    if extra or unknown:
        refuse(safe_rsqrt, extra, unknown)
    return _safe_rsqrt.call(input, eps, 0.0, dtype)

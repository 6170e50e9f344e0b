"""safe_log: log(max(x, eps))."""

from safeops.core.dtypes import filled
from safeops.core.foreign import refuse
from safeops.ops.elementwise._unary import Unary, lift


def log(x):
    """log(x), as log(x s) - log(s) with `lift`: derivatives do not overflow for a tiny x."""
    lifted, s = lift(x)
    return lifted.log() - s.log()


_safe_log = Unary(
    "safe_log",
    log,
    absent=lambda x, eps: x < eps,
    stand_in=lambda x, eps, fill_value: filled(x, (), eps).log(),
    positive=True,
)

# ---- public function


@_safe_log.public("(Tensor input, *, float? eps=None, ScalarType? dtype=None) -> Tensor")
def safe_log(input, *extra, eps=None, dtype=None, **unknown):
    """`log(max(input, eps))`, finite for finite input.

    The gradient is `1 / input` from `eps` on and exactly 0 below. A NaN, and a positive inf, show in the result. The
    floor is applied in fp32 (fp64 for fp64), where 1e-8 is not 0 as it is in fp16, and nothing is changed in place.

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
        >>> safeops.safe_log(torch.tensor([1.0, 0.0]), eps=1e-3)
        tensor([ 0.0000, -6.9078])
    """
    if extra or unknown:
        refuse(safe_log, extra, unknown)
    return _safe_log.call(input, eps, 0.0, dtype)

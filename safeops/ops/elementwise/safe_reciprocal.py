"""safe_reciprocal: 1 / x, with the rules of safe_div."""

from safeops.core import check
from safeops.core.dtypes import filled, saturate
from safeops.core.foreign import refuse
from safeops.ops.elementwise._unary import Unary
from safeops.ops.elementwise.safe_div import _safe_div, quotient

_safe_reciprocal = Unary(
    "safe_reciprocal",
    lambda x: quotient(1, x),
    absent=lambda x, eps: x.abs() < eps,
    stand_in=lambda x, eps, fill_value: filled(x, (), saturate(fill_value, x.dtype)),
)

# ---- public function


@_safe_reciprocal.public("(Tensor input, *, float? eps=None, float? fill_value=0.0, ScalarType? dtype=None) -> Tensor")
def safe_reciprocal(input, *extra, eps=None, fill_value=0.0, dtype=None, **unknown):
    """`1 / input`, finite for finite input: `safe_div` of 1 by `input`.

    Where `|input| < eps` or `input == 0` the result is `fill_value` and the gradient 0. A reciprocal that does not fit
    the output dtype saturates at its largest finite value, with gradient 0. A NaN shows in the result. With
    `fill_value=None` it is `1 / (sign(input) max(|input|, eps))`, 0 counted as positive, with gradient 0 below eps.

    Args:
        input: floating (or integer) tensor.
        eps: smallest magnitude that counts, at least 0; a floor, never added. None: the smallest normal number of
            the compute dtype (1.2e-38 in fp32, which half inputs use; 2.2e-308 in fp64).
        fill_value: the stand-in; a finite one saturates to the dtype. None: a floor under the divisor (`eps` above 0).
        dtype: output dtype. None: `input`'s (of integers: the default dtype), at least fp32 under autocast.

    Returns:
        A tensor of `input`'s shape.

    Raises:
        TypeError: `input` is not a real tensor, eps or fill_value is not a number, dtype is not floating.
        ValueError: eps is negative, or 0 with `fill_value=None`.

    Example:
        >>> safeops.safe_reciprocal(torch.tensor([0.0, 4.0]))
        tensor([0.0000, 0.2500])
    """
    if extra or unknown:
        refuse(safe_reciprocal, extra, unknown)
    if fill_value is None:
        _safe_reciprocal.validate(input, eps, 0.0, dtype)
        if eps is not None:
            check.number("safe_reciprocal", "eps", eps, above=0)
        return _safe_div.call(input.new_ones(()), input, eps, None, dtype)
    return _safe_reciprocal.call(input, eps, fill_value, dtype)

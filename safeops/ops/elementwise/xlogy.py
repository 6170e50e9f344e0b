"""xlogy: input * log(other), 0 where input is 0."""

import torch

from safeops.core.domain import any_number, positive
from safeops.core.dtypes import wide
from safeops.ops.elementwise._binary import Binary
from safeops.ops.elementwise.safe_log import log

# ---- definition


def _define(x, y, eps, fill_value, dtype):
    none = (x == 0) & ~((y > 0) & y.isfinite())  # 0 times a logarithm that is not finite: masked out
    product = wide(torch.where(none, 0, x)) * log(wide(torch.where(none, 1, y)))
    return torch.where(none, 0, product + 0.0).to(dtype)  # + 0 turns -0 into 0


# ---- op

_xlogy = Binary("xlogy", _define, safe=False, domain=(any_number, positive))

# ---- public function


@_xlogy.public(
    "(Tensor input, Tensor other) -> Tensor",
    ".Scalar(Tensor input, Scalar other) -> Tensor",
)
def xlogy(input, other):
    """`input * log(other)`, and 0 where `input` is 0: `torch.xlogy` for losses.

    Where `input` is 0 and `other` has no finite logarithm, the position counts as masked out, with both gradients
    exactly 0: so for an `other` of NaN (torch: NaN) and of 0 (torch: a gradient of NaN).

    Elsewhere it is the plain product. Its gradient to `input` is log(other): -inf where `other` is 0, NaN where it is
    negative (`input * safe_log(other)` has a floor). Half is computed in fp32 and rounded once. The dtype is the
    promoted one (of integers: the default dtype), also under autocast.

    Args:
        input: floating (or integer) tensor.
        other: tensor broadcastable with `input`, or a number.

    Returns:
        A tensor of the broadcast shape of `input` and `other`.

    Raises:
        TypeError: an operand is not a real tensor.
        ValueError: shapes do not broadcast, devices differ.

    Example:
        >>> safeops.xlogy(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 2.0]))
        tensor([0.0000, 1.3863])
    """
    return _xlogy.call(input, other)

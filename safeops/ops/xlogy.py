"""xlogy: input * log(other), 0 where input is 0."""

import torch

from safeops._library import declare_public
from safeops.ops._binary import Binary

# ---- definition


def _define(x, y, eps, fill_value, dtype):
    zero = x == 0  # masked out, whatever `other` is there
    product = torch.where(zero, 0, x) * torch.where(zero, 1, y).log()
    return torch.where(zero, 0, product).to(dtype)


# ---- op

_xlogy = Binary("xlogy", _define, safe=False)

# ---- public function


def xlogy(input, other):
    """`input * log(other)`, and 0 where `input` is 0, with both gradients exactly 0 there: `torch.xlogy` for losses.

    Where `input` is 0 the position counts as masked out, also over a NaN (torch: NaN) and over a 0 (torch: a gradient
    that is NaN). Elsewhere it is the plain product: -inf or NaN where `other` is 0 or negative (`input *
    safe_log(other)` has a floor). Half operands are read wide and rounded once. The dtype is the promoted one (of
    integers: the default dtype), also under autocast.

    Args:
        input: floating (or integer) tensor.
        other: tensor broadcastable with `input`, or a number.

    Returns:
        A tensor of the broadcast shape of `input` and `other`.

    Raises:
        TypeError: an operand is no (real) tensor.
        ValueError: shapes do not broadcast, devices differ.

    Example:
        >>> safeops.xlogy(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 2.0]))
        tensor([0.0000, 1.3863])
    """
    return _xlogy.call(input, other)


declare_public(
    xlogy,
    "xlogy(Tensor input, Tensor other) -> Tensor",
    "xlogy.Scalar(Tensor input, Scalar other) -> Tensor",
)

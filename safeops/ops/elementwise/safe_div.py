"""safe_div: input / other, with a fill value or a floor where the divisor is 0 or tiny, and saturation."""

import math

import torch

from safeops.core import check
from safeops.core.dtypes import compute_dtype, largest_like, overflows, saturate, to_one
from safeops.core.foreign import refuse
from safeops.ops.elementwise._binary import Binary

# ---- definition


def _define(a, b, eps, fill_value, dtype):
    if isinstance(eps, torch.Tensor):  # a symbolic number: a compiled call does not know its sign
        b, eps = floored(b, -eps), eps.clamp(min=0)
    elif eps < 0:  # fill_value=None: a floor (see Division)
        b, eps = floored(b, -eps), 0
    keep = ~((b.abs() < eps) | (b == 0))  # a NaN divisor is kept, and shows
    with torch.no_grad():
        q = torch.where(keep, a, 0) / torch.where(keep, b, 1)
        over = overflows(q, dtype) & a.isfinite()
        stand_in = torch.where(keep, largest_like(q, dtype), saturate(fill_value, dtype))
    true = keep & ~over
    # Select before dividing: elements that get a stand-in must not reach the division, forward or backward.
    result = quotient(torch.where(true, a, 0), torch.where(true, b, 1))
    return torch.where(true, result.to(dtype), stand_in.to(dtype))


def floored(b, least):
    """sign(b) max(|b|, least), with sign(0) = 1; the gradient is 0 where |b| < least. If `least` is a tensor of 0 or
    less, the result is b."""
    info = torch.finfo(b.dtype)
    smallest = info.tiny * info.eps  # replaces a floor that b's dtype rounds to 0
    if isinstance(least, torch.Tensor):
        sizes = least.to(b.dtype).clamp(min=smallest).expand(b.shape)
        below = (b.abs() < sizes) & (least > 0)
    else:
        sizes = torch.full_like(b, max(least, smallest) if least <= info.max else math.inf)
        below = b.abs() < sizes
    return torch.where(below, sizes.copysign(torch.where(b < 0, -1.0, 1.0)), b)


def quotient(a, b):
    """a / b. Its computed derivatives overflow only where the true ones do."""
    a_, b_ = (x.detach() if isinstance(x, torch.Tensor) else x for x in (a, b))  # no_grad would keep the tangents
    info = torch.finfo(b.dtype)
    q = a_ / b_
    # The backward divides a by b twice: a / b^2 may overflow where g a / b^2 does not, or where g, the upstream
    # gradient, is 0. There `scale`, a power of two, brings b to [1, 2). Else it is 1: g a / b may be what overflows.
    fits = ~b_.isfinite() | ((b_.abs() >= 1) & ((q / b_).abs() >= info.tiny))
    scale = torch.where(fits, 1, to_one(b_))
    room = torch.where(q.abs() > info.max / 4, 4, 1)  # a * scale, up to 2 q, must not overflow
    return (a * (scale / room)) / (b * scale) * room


# ---- op


class Division(Binary):
    """The record of safe_div. fill_value=None means a floor under the divisor: the raw op gets it as a negative eps, so
    that forward and backward need no further argument."""

    def prepare(self, input, other, eps=None, fill_value=0.0, dtype=None):
        if fill_value is not None:
            return super().prepare(input, other, eps, fill_value, dtype)
        self.validate(input, other, eps, None, dtype)
        # (the default floor depends on the tensors' dtypes only: super().prepare may turn a number into an fp64 tensor)
        dtypes = [x.dtype for x in (input, other) if isinstance(x, torch.Tensor)]
        takes, (input, other, _, *rest) = super().prepare(input, other, 1.0, 0.0, dtype)
        compute = compute_dtype(*dtypes, rest[1] if rest else input.dtype)
        return takes, (input, other, -(torch.finfo(compute).tiny if eps is None else eps), *rest)

    def validate(self, input, other, eps=None, fill_value=0.0, dtype=None):
        super().validate(input, other, eps, 0.0 if fill_value is None else fill_value, dtype)
        if fill_value is None and eps is not None:
            check.number(self.name, "eps", eps, above=0)


_safe_div = Division("safe_div", _define)

# ---- public function


@_safe_div.public(
    "(Tensor input, Tensor other, *, float? eps=None, float? fill_value=0.0, ScalarType? dtype=None) -> Tensor",
    ".Scalar(Tensor input, Scalar other, *, float? eps=None, float? fill_value=0.0, ScalarType? dtype=None) -> Tensor",
)
def safe_div(input, other, *extra, eps=None, fill_value=0.0, dtype=None, **unknown):
    """`input / other`, finite for finite input; no NaN or inf gradient comes from a division that has no value.

    Where `|other| < eps` or `other == 0` the position counts as masked out: the result is `fill_value`, whatever
    `input` holds there, and both gradients are 0. A quotient that does not fit the output dtype saturates at its
    largest finite value, with gradient 0. A NaN divisor, and a NaN or inf numerator over a kept divisor, show in the
    result.

    Half operands are divided in fp32 and rounded once. A true gradient that overflows its dtype (such as that of a
    divisor of 1e-3 in fp16) becomes inf, which GradScaler looks for; a larger `eps` masks such divisors out.

    With `fill_value=None` a small divisor is replaced and the position still counts: `input / (sign(other) max(|other|,
    eps))`, 0 counted as positive, which is what `input / (other + eps)` is meant to be. The gradient of `input` is that
    of this quotient, the gradient of `other` is 0 below eps.

    Args:
        input: floating (or integer) tensor.
        other: tensor broadcastable with `input`, or a number.
        eps: smallest divisor magnitude that counts, at least 0; a floor, never added. None: the smallest normal number
            of the compute dtype (1.2e-38 in fp32, which half inputs use; 2.2e-308 in fp64).
        fill_value: the stand-in; a finite one saturates to the dtype. None: a floor under the divisor (`eps` above 0).
        dtype: output dtype. None: the promoted input dtype (of integers: the default dtype), at least fp32 under
            autocast.

    Returns:
        A tensor of the broadcast shape of `input` and `other`.

    Raises:
        TypeError: an operand is not a real tensor, eps or fill_value is not a number, dtype is not floating.
        ValueError: shapes do not broadcast, devices differ, eps is negative, or 0 with `fill_value=None`.

    Example:
        >>> safeops.safe_div(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 4.0]))
        tensor([0.0000, 0.2500])
    """
    if extra or unknown:
        refuse(safe_div, extra, unknown)
    return _safe_div.call(input, other, eps, fill_value, dtype)

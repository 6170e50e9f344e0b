"""masked_norm: the vector norm of the kept elements."""

import torch

from safeops.core.definitions import absolute
from safeops.core.foreign import refuse
from safeops.core.symbolic import SYMBOLIC, scalar
from safeops.ops.reductions._statistic import EXTREME, LINEAR, SIGN, Statistic, extreme, pick, reciprocal, root

INF = float("inf")
KINDS = {2: LINEAR, 1: SIGN, INF: EXTREME, -INF: EXTREME}  # the orders that have kernels


def norm(k, ord, safe=False):
    """Returns (value, origin, scale). safe: True: where the norm of finite elements overflows, its gradient is 0."""
    order = None if isinstance(ord, SYMBOLIC) else ord  # symbolic: treated as any other order
    if order == 2:
        binade = k.binade()
        x = k.x / binade
        value = binade * root(k.sum(x * k.weighted(x)))
        return value, torch.zeros_like(value), reciprocal(value)
    a = absolute(k.x)
    if order == 1:
        value = k.sum(k.weighted(a))
        return value, torch.zeros_like(value), torch.ones_like(value)
    if order in (INF, -INF):
        value, ties = pick(k, a, k.largest(a) if ord > 0 else -k.largest(-a))
        return value, value, 1 / ties
    value = _any_order(k, a, ord, safe)
    return value, value, value  # origin and scale are not read: these orders have no kernel


def _any_order(k, a, ord, safe):
    """(sum w |x|^ord)^(1 / ord). An element of 0 gets gradient 0, though the true gradient may be infinite."""
    zero = a == 0
    if ord == 0:
        return k.sum(k.weighted(k.select(torch.where(a.isnan(), a, (~zero).to(a.dtype)), 0)))
    # a is divided by its largest element (for ord < 0: by its smallest that is not 0), so that no power overflows.
    fixed = a.detach()
    top = k.largest(fixed) if ord > 0 else -k.largest(-torch.where(zero, INF, fixed))
    top = torch.where((top > 0) & top.isfinite(), top, 1)
    # ord becomes a tensor, since pow with a symbolic number has no derivative. It is clamped to 1e20: there the powers
    # of all elements but the extreme one are 0 already.
    power = scalar(ord, torch.float64, a.device).clamp(-1e20, 1e20)
    power, inverse = power.to(a.dtype), (1 / power).to(a.dtype)
    terms = torch.where(zero, 0, torch.where(zero, 1, a / top) ** power)
    total = k.sum(k.weighted(k.select(terms, 0)))
    vanishes, infinite = total == 0, total.isinf()
    usual = ~(vanishes | infinite)

    def value_of(total):
        root = total ** (inverse / 2)  # top root^2 may fit where root^2 overflows
        return top * root * root

    if safe:
        with torch.no_grad():
            usual &= ~value_of(torch.where(usual, total, 1)).isinf()
    value = torch.where(usual, value_of(torch.where(usual, total, 1)), INF)
    value = torch.where(infinite, torch.where(infinite, total, 1) ** inverse, value)
    if ord < 0:
        # a kept 0 has an infinite power: the norm is 0. An inf has the power 0: the norm of infs alone is inf.
        none = ~k.sum(k.select(zero, False).to(a.dtype)).bool() | total.isnan()
        return torch.where(none, value, 0)
    return torch.where(vanishes, 0, value)


def _part(value, origin, scale, ord):
    if ord == 1:
        return {"weight": value}
    return {"x": value} if ord == 2 else extreme(value, origin, scale)


class Norm(Statistic):
    def __init__(self, *arguments):
        super().__init__(*arguments, part=_part)
        self.numbers = ()  # ord chooses the formula: it stays a number in a trace

    def has_kernel(self, ord):
        return super().has_kernel(ord) and ord in (1, 2, INF, -INF)

    def validate(self, *arguments):
        super().validate(*arguments)
        if arguments[-1] != arguments[-1]:
            raise ValueError(f"{self.name}: ord must be a number, got nan")


_masked_norm = Norm("masked_norm", norm, KINDS, "ord")


@_masked_norm.public(parameter="Scalar ord=2, ")
def masked_norm(
    input, mask=None, dim=None, *extra, ord=2, keepdim=False, weight=None, dtype=None, empty="zero", **unknown,
):  # fmt: skip
    """The vector norm of the kept elements: (sum(weight * |input|^ord))^(1 / ord).

    It replaces `x[mask].norm()` and `torch.where(mask, x, 0).norm()`. |x|^ord neither overflows nor underflows where
    the norm does not, and the gradient at a vector of zeros is 0.

    Args:
        ord: any number, as in `torch.linalg.vector_norm`. inf is the largest magnitude, -inf the smallest: equal ones
            share the gradient evenly, and a weight other than 0 changes nothing. 0 counts the elements that are not 0.
            Orders other than 1, 2, inf and -inf have no kernel: they run as plain torch operations.
        {arguments}

    Example:
        >>> x = torch.tensor([3e30, 4e30, torch.nan])
        >>> safeops.masked_norm(x, x.isfinite())
        tensor(5.0000e+30)
    """
    if extra or unknown:
        refuse(masked_norm, extra, unknown)
    return _masked_norm.call(input, mask, dim, keepdim, weight, dtype, empty, ord)

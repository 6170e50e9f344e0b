"""The statistics: masked reductions that are not a plain sum. They share one backward.

A statistic is `Statistic(name, define, kind)`: `define(k, parameter)` computes (value, origin, scale) from the kept
elements `k`, and `kind` selects the formula of the gradient. With grad, scale and origin of the result that x is in:

    dx = grad * scale * weight * shape(x, origin)

where shape is x - origin (LINEAR), x == origin (EQUAL), exp(x - origin) (EXP), sign(x) (SIGN), or sign(x) where
|x| == origin (EXTREME). EQUAL and EXTREME use the weight only as a mask.

If several ranks hold the elements, each rank computes (value, origin, scale) of its part. The definition then runs
again, on `Parts` in place of elements: the maximum of the parts' maxima, the norm of the parts' norms.
"""

import torch

from safeops.core import check
from safeops.core.definitions import accumulate, count_kept, kept
from safeops.core.dtypes import compute_dtype, widens
from safeops.core.library import declare_raw
from safeops.core.reduction import Reduction, output_shape

LINEAR, EQUAL, EXP, SIGN, EXTREME = range(5)

# ---- definition


class Kept:
    """The kept elements, as a definition reads them. Methods reduce with keepdim. `largest`, `binade`: no gradient."""

    def __init__(self, input, mask, weight, dims, compute, dtype=None):
        self.dims, self.dtype = dims, dtype  # dtype: the result's
        self.keep = kept(mask, weight)  # None: all
        self.x = self.select(input.to(compute), 0)
        # an fp64 weight may be out of fp32's range: it makes the computation fp64
        self.weight = None if weight is None else torch.where(self.keep, weight.to(compute), 0)
        self.count = count_kept(self.keep, input, dims, True)

    def select(self, x, other):
        return x if self.keep is None else torch.where(self.keep, x, other)

    def weighted(self, x):
        """x times the weight. x is 0 where it is not kept."""
        return x if self.weight is None else x * self.weight

    def sum(self, x):
        return accumulate(x, self.dims, True)

    def number(self, which):
        """The number of elements where `which` (bool) is True."""
        return self.sum(which.expand(self.x.shape))

    def squares(self, d, unit):
        """The weighted sum of d^2. unit: d is a number of units (`Parts` needs it)."""
        return self.sum(d * self.weighted(d))

    def total_weight(self, like):
        """The sum of the weights; without weights the count, in the dtype of the tensor `like`."""
        if self.weight is None:
            return self.count.to(like.dtype)
        return self.sum(self.weight.expand(self.x.shape))

    def largest(self, x):
        """The largest kept element. NaN if a kept element is NaN; -inf if none is kept."""
        with torch.no_grad():
            if x.numel() == 0:  # amax refuses an empty tensor
                return self.sum(x) - float("inf")
            return self.select(x, float("-inf")).amax(self.dims, keepdim=True)

    def sizes(self):
        return self.x.abs()

    def binade(self):
        """The power of two b with (largest kept |x|) / b in [1, 2). The squares of x / b do not overflow, nor do all
        underflow, and the division is exact."""
        with torch.no_grad():
            largest = self.largest(self.sizes())
            usual = (largest > 0) & largest.isfinite()
            # frexp's exponent is not used: with this int32, Inductor's CPU code for float64 does not compile. Nor are
            # the bits: view(dtype) has no batching rule before torch 2.13. The quotient is a power of two: exact.
            largest = torch.where(usual, largest, 1)
            binade = largest / (2 * torch.frexp(largest).mantissa)
            return binade.clamp(min=torch.finfo(largest.dtype).tiny)


class Parts(Kept):
    """The results of several parts of the elements, (parts, *results), which a definition reads like elements.

    For each part, x: its result; None: 1. count: its number of kept elements. weight: the weight of x, or None. ties:
    how many of its elements equal x. spread: the standard deviation of its elements from x. The sum of all elements'
    squared deviations from their mean is the sum over parts of weight ((x - mean)^2 + spread^2).
    """

    def __init__(self, dtype, count, x=None, weight=None, ties=None, spread=None):
        self.dims, self.dtype, self.keep = [0], dtype, count > 0
        x = torch.ones_like(count) if x is None else x
        self.count = count.sum(0, keepdim=True)
        self.x, self.ties, self.spread = self.select(x, 0), ties, spread
        self.weight = None if weight is None else self.select(weight, 0)

    def number(self, which):
        return self.sum(torch.where(which, self.ties, 0))

    def squares(self, d, unit):
        return self.sum(self.weighted(d.square() + self.select(self.spread / unit, 0).square()))

    def sizes(self):
        return self.x.abs() if self.spread is None else self.x.abs() + self.spread


def root(square):
    """sqrt(square), with gradient 0 at 0."""
    zero = square == 0
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())


def reciprocal(x):
    """1 / x, and 0 where x is 0."""
    return torch.where(x == 0, 0, 1 / torch.where(x == 0, 1, x))


def pick(k, x, top):
    """Returns (top, number of elements equal to top). top: the largest or smallest kept x. They share the gradient."""
    ties = k.select((x == top) | (x.isnan() & top.isnan()), False)
    count = k.number(ties).clamp(min=1)
    # For a finite top, x - base is 0 at the ties: the value stays exactly top, and each tie's gradient is 1 / count.
    base = torch.where(top.isfinite(), top, 0)
    return base + k.sum(torch.where(ties, x - base, 0)) / count, count


def define(statistic, input, mask, weight, dims, keepdim, empty_nan, dtype, parameter):
    """Returns (value, origin, scale), which the top of the file explains."""
    compute = compute_dtype(input.dtype, dtype, *(() if weight is None else (weight.dtype,)))
    if widens(input):
        compute = torch.float64  # sums as in `accumulate`; also, a gradient times a tiny norm underflows in fp32
    k = Kept(input, mask, weight, dims, compute, dtype)
    nothing = float("nan") if empty_nan else 0.0
    if weight is not None and weight.requires_grad:
        # (amax and amin do not depend on the weight: this unused branch makes weight's gradient 0, not None.)
        nothing = torch.where(torch.zeros_like(k.count, dtype=torch.bool), weight.sum(), nothing)
    value, origin, scale = finish(statistic, k, nothing, parameter)
    if not keepdim:
        for d in reversed(dims):  # one by one: DTensors take squeeze(dims) from torch 2.12 on
            value, origin, scale = (t.squeeze(d) for t in (value, origin, scale))
    return value, origin, scale


def finish(statistic, k, nothing, parameter):
    """Returns (value, origin, scale). nothing: the value where the statistic does not exist (nothing is kept)."""
    value, origin, scale, *exists = statistic(k, parameter)
    exists = exists[0] if exists else k.count > 0
    return torch.where(exists, value, nothing).to(k.dtype), origin, torch.where(exists, scale, 0.0)


def define_backward(grad, input, origin, scale, mask=None, weight=None, kind=0, dim=None, keepdim=False):
    """dx, for the devices without a kernel."""
    dims = check.dims("_statistic_backward", dim, input.dim())
    if not keepdim:
        for d in dims:
            grad, origin, scale = (t.unsqueeze(d) for t in (grad, origin, scale))
    keep = kept(mask, weight)
    x = input.double()
    sign = torch.where(x.isnan(), x, x.sign())
    power = torch.where(x == origin, 0, x - origin)  # 0 for inf - inf, too
    shape = (x - origin, torch.ones_like(x), power.exp(), sign, sign)[kind]
    dx = torch.where(scale == 0, 0, grad.double() * scale) * shape  # scale 0: dx is 0 for any grad, NaN too
    if kind in (EQUAL, EXTREME):  # selected, not multiplied: an upstream NaN reaches only these elements
        extreme = ((x if kind == EQUAL else x.abs()) == origin) | (x.isnan() & origin.isnan())
        keep = extreme if keep is None else keep & extreme
    elif weight is not None:
        dx = dx * weight
    dx = dx if keep is None else torch.where(keep, dx, 0)
    return torch.empty_like(input).copy_(dx)


# ---- op

_SCHEMA = (
    "(Tensor input, Tensor? mask=None, Tensor? weight=None, int[]? dim=None, bool keepdim=False, bool empty_nan=False, "
    "ScalarType? dtype=None, float parameter=0.0) -> (Tensor value, Tensor origin, Tensor scale)"
)


def _fake(input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0):
    shape = output_shape(input.shape, dim, keepdim)
    value = input.new_empty(shape, dtype=dtype or compute_dtype(input.dtype))
    return value, input.new_empty(shape, dtype=torch.float64), input.new_empty(shape, dtype=torch.float64)


def _fake_backward(grad, input, origin, scale, mask=None, weight=None, kind=0, dim=None, keepdim=False):
    return torch.empty_like(input)


_statistic_backward = declare_raw(
    "_statistic_backward",
    "(Tensor grad, Tensor input, Tensor origin, Tensor scale, Tensor? mask=None, Tensor? weight=None, int kind=0, "
    "int[]? dim=None, bool keepdim=False) -> Tensor",
    fake=_fake_backward,
    composite=define_backward,
    triton="reductions.statistic_backward.statistic_backward",
)

# ---- record


def extreme(value, origin, scale, *parameter):
    return {"x": value, "ties": reciprocal(scale)}


class Statistic(Reduction):
    """The record of a statistic. kind: LINEAR to EXTREME, or {parameter: kind}. keyword: the parameter's public name.
    file: the file of kernels/reductions with its launcher, if that is named after another op.

    For elements on several ranks: part(value, origin, scale, parameter) returns the arguments of `Parts` from a part's
    results. weighs: True if a part's weight is the sum of its elements' weights. of_part: (record, parameter) of the
    statistic that each part computes; None: this one.
    """

    shards, of_part = "statistic", None

    def __init__(self, name, statistic, kind, keyword=None, file=None, part=extreme, weighs=False):
        self.statistic, self.part, self.weighs = statistic, part, weighs

        def composite(
            input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0
        ):
            dims = check.dims(name, dim, input.dim())
            dtype = dtype or compute_dtype(input.dtype)
            value, *others = define(statistic, input, mask, weight, dims, keepdim, empty_nan, dtype, parameter)
            return value, *(x.to(torch.float64) for x in others)

        def definition(*operands):
            return composite(*operands)[0]

        self.kind = kind
        forward = declare_raw(
            f"_{name}", _SCHEMA, fake=_fake, composite=composite, triton=f"reductions.{file or name}.{name}"
        )
        super().__init__(name, forward, _statistic_backward, definition, keyword=keyword)

    def gradients(self, grad, needs, operands, results):
        x = operands
        kind = self.kind[x.parameter] if isinstance(self.kind, dict) else self.kind
        return (self.backward(grad, x.input, *results, x.mask, x.weight, kind, x.dim, x.keepdim),)

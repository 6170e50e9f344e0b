"""The statistics: masked reductions that are no plain sum, and share one backward.

A statistic is `Statistic(name, define, kind)`: `define(k, parameter)` says what it is of the kept elements `k`, and
`kind` which shape its gradient has. With grad, scale and origin of the result that x went into,

    dx = grad * scale * weight * shape(x, origin)

where shape is x - origin (LINEAR), x == origin (EQUAL), exp(x - origin) (EXP), sign(x) (SIGN), or sign(x) where
|x| == origin (EXTREME). The two that compare take the weight for a mask and no more.

Of elements that several ranks hold, each rank has the three numbers of its own. `Parts` are those, and the same
definition makes the whole of them: the largest of largest ones, the norm of norms.
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
    """The kept elements, as a definition sees them. Every result has keepdim, and what is constant has no gradient."""

    def __init__(self, input, mask, weight, dims, compute, dtype=None):
        self.dims, self.dtype = dims, dtype  # dtype: the result's
        self.keep = kept(mask, weight)  # None: all
        self.x = self.select(input.to(compute), 0)
        # a weight too small or too large for fp32 is read as it is
        self.weight = None if weight is None else torch.where(self.keep, weight.to(compute), 0)
        self.count = count_kept(self.keep, input, dims, True)

    def select(self, x, other):
        return x if self.keep is None else torch.where(self.keep, x, other)

    def weighted(self, x):
        """x, which is 0 where nothing is kept, times the weight."""
        return x if self.weight is None else x * self.weight

    def sum(self, x):
        return accumulate(x, self.dims, True)

    def number(self, which):
        """How many of the elements."""
        return self.sum(which.expand(self.x.shape))

    def squares(self, d, unit):
        """The sum of the squares of distances, in units of `unit`."""
        return self.sum(d * self.weighted(d))

    def total_weight(self, like):
        """The sum of the weights, or the count, in the dtype of a sum."""
        if self.weight is None:
            return self.count.to(like.dtype)
        return self.sum(self.weight.expand(self.x.shape))

    def largest(self, x):
        """The largest kept element, NaN where one is; -inf where none is kept."""
        with torch.no_grad():
            if x.numel() == 0:  # amax refuses
                return self.sum(x) - float("inf")
            return self.select(x, float("-inf")).amax(self.dims, keepdim=True)

    def sizes(self):
        return self.x.abs()

    def binade(self):
        """A power of two that brings the largest magnitude into [1, 2): squares of x / binade neither overflow nor all
        underflow, and the division is exact."""
        with torch.no_grad():
            largest = self.largest(self.sizes())
            usual = (largest > 0) & largest.isfinite()
            # Not by frexp's exponent, an int32 (Inductor's CPU code for float64 does not compile), nor by the bits
            # (view(dtype) has no batching rule before torch 2.13). The quotient is a power of two, and so exact.
            largest = torch.where(usual, largest, 1)
            binade = largest / (2 * torch.frexp(largest).mantissa)
            return binade.clamp(min=torch.finfo(largest.dtype).tiny)


class Parts(Kept):
    """The results of several parts, (parts, *results), as a definition sees elements: each stands for its part.

    x: what a part found, None for 1. count: of how many elements. weight: what x weighs, or None. ties: how many of the
    elements are x. spread: their deviation from x.
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
    """sqrt with gradient 0 at 0."""
    zero = square == 0
    return torch.where(zero, 0, torch.where(zero, 1, square).sqrt())


def reciprocal(x):
    """1 / x, and 0 where x is 0."""
    return torch.where(x == 0, 0, 1 / torch.where(x == 0, 1, x))


def pick(k, x, top):
    """(top, its ties): the extreme `top` of x, whose gradient all elements equal to it share evenly."""
    ties = k.select((x == top) | (x.isnan() & top.isnan()), False)
    count = k.number(ties).clamp(min=1)
    # x - base is 0 where top is finite: its value stays exact, and its gradient is 1 / ties.
    base = torch.where(top.isfinite(), top, 0)
    return base + k.sum(torch.where(ties, x - base, 0)) / count, count


def define(statistic, input, mask, weight, dims, keepdim, empty_nan, dtype, parameter):
    """(value, origin, scale): see the top of the file for the last two."""
    compute = compute_dtype(input.dtype, dtype, *(() if weight is None else (weight.dtype,)))
    if widens(input):
        compute = torch.float64  # as `accumulate`; and a gradient times a tiny norm underflows in fp32
    k = Kept(input, mask, weight, dims, compute, dtype)
    nothing = float("nan") if empty_nan else 0.0
    if weight is not None and weight.requires_grad:
        # The largest has a weight's gradient of 0, not none: the sum is part of the graph, and is never taken.
        nothing = torch.where(torch.zeros_like(k.count, dtype=torch.bool), weight.sum(), nothing)
    value, origin, scale = finish(statistic, k, nothing, parameter)
    if not keepdim:
        for d in reversed(dims):  # one by one: DTensors take squeeze(dims) from torch 2.12 on
            value, origin, scale = (t.squeeze(d) for t in (value, origin, scale))
    return value, origin, scale


def finish(statistic, k, nothing, parameter):
    """nothing: what the value is where there is none."""
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
    power = torch.where(x == origin, 0, x - origin)  # of two that are inf, too
    shape = (x - origin, torch.ones_like(x), power.exp(), sign, sign)[kind]
    dx = torch.where(scale == 0, 0, grad.double() * scale) * shape  # no slope: whatever the gradient
    if kind in (EQUAL, EXTREME):  # selected: a NaN from upstream stays with the extreme
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
    """A statistic. `kind` may be a table by the parameter, which users know as `keyword`. `file`: the one of
    kernels/reductions with its launcher, where that is named after another op.

    part: (value, origin, scale, parameter) of a part -> what `Parts` takes of it. weighs: whether a part weighs as much
    as its elements. of_part: (record, parameter) of the statistic of a part, None: this one.
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

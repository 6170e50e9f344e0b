"""The state of a statistic that is more than a sum, for a lane, a block or a split, and how states are merged.

A state is the tuple (count, weights, pivot, shift, maximum, total). Each MODE uses some of it:

    count     how many elements are kept. For MOMENTS with weights only count = 0 matters: else it holds the
              largest `heaviness` (accumulate.py) of a kept weight, which saves a register per lane
    weights   the sum of the kept weights (SQUARES and MOMENTS with weights)
    total     in the unit that `maximum` sets:
              SQUARES       sum w x^2            = total maximum^2, maximum a power of two near the largest |x|
              MOMENTS       sum w (x - pivot)^2  = total maximum^2, maximum a power of two near the largest |x - pivot|
              EXPONENTIALS  sum w exp(x)         = total exp(maximum), maximum the largest x
              EXTREME       maximum the largest x, NaN above all others; total how many elements equal it
              ABSOLUTE      sum w |x|            = total
    pivot     MOMENTS: an element, from which deviations are taken; with weights, a lane's heaviest
    shift     MOMENTS: sum w (x - pivot) = shift maximum

Nothing overflows or underflows on the way to a result that does neither, as long as no difference of two elements does.
A variance loses no digits to a large mean: the pivot is one of the elements, and its distance from the others is part
of their variance, unless its weight is small beside theirs. So the pivot is the heaviest. States are merged pairwise:
both are moved to a common pivot (Chan, Golub and LeVeque 1979), scaled to a common maximum, and added.
"""

import triton
import triton.language as tl

from .blocks import load
from .math import exponential, rounded_product
from .scaling import power_below, reciprocal

COUNT, ABSOLUTE, SQUARES, EXPONENTIALS, EXTREME, MOMENTS = map(tl.constexpr, range(6))  # MODE
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOWEST_DOUBLE = tl.constexpr(-1.7976931348623157e308)
# Indices of the arrays of partials; a state stores only those that its MODE needs
COUNTS, TOTALS, MAXIMA, SHIFTS, PIVOTS, WEIGHTS = map(tl.constexpr, range(6))
ARRAYS = {COUNT: 1, ABSOLUTE: 2, SQUARES: 3, EXPONENTIALS: 3, EXTREME: 3, MOMENTS: 5}  # for states without weights
MOST_ARRAYS = 6


@triton.jit
def lowest_maximum(shape: tl.constexpr, MODE: tl.constexpr, C: tl.constexpr):
    """The maximum of a state without elements, in dtype C: below every other maximum."""
    if MODE == EXTREME:
        maximum = tl.full(shape, float("-inf"), C)
    elif MODE == EXPONENTIALS:
        maximum = tl.full(shape, LOWEST_DOUBLE if C == tl.float64 else LOWEST, C)
    else:
        maximum = power_below(tl.zeros(shape, C))
    return maximum


@triton.jit
def empty_state(shape: tl.constexpr, MODE: tl.constexpr, C: tl.constexpr, COUNT_TYPE: tl.constexpr):
    zero = tl.zeros(shape, C)
    return tl.zeros(shape, COUNT_TYPE), zero, zero, zero, lowest_maximum(shape, MODE, C), zero


@triton.jit
def empty_double_state(shape: tl.constexpr, MODE: tl.constexpr, C: tl.constexpr):
    """An empty state in fp64 with C's lowest maximum. For EXPONENTIALS it is finite: exp(maximum - other) is no NaN."""
    return widened(empty_state(shape, MODE, C, C))


@triton.jit
def widened(state):
    """The state in fp64, but pivot and maximum in C: they are exact, and fp64 comparisons take ten times as long."""
    count, weights, pivot, shift, maximum, total = state
    return count.to(tl.float64), weights.to(tl.float64), pivot, shift.to(tl.float64), maximum, total.to(tl.float64)


@triton.jit
def square(x):
    return x * x


@triton.jit
def repivot(total, shift, w, maximum, away, by):
    """Moves (total, shift) from pivot p to pivot q, in the unit 1 / by. away: p - q; w: the sum of the weights.

    sum w (x - q)   = sum w (x - p) + (p - q) sum w
    sum w (x - q)^2 = sum w (x - p)^2 + 2 (p - q) sum w (x - p) + (p - q)^2 sum w"""
    scale, away = (maximum * by).to(total.dtype), away * by
    shift, moved = shift * scale, w * away
    return total * square(scale) + (2 * shift + moved) * away, shift + moved


@triton.jit
def less_maximum(x, maximum):
    """x - maximum for a maximum that is not below x: NaN if x is NaN, and 0 if both are inf (with one instruction less
    than a `where`). Beside a maximum of inf, the largest finite x gives 0, too."""
    largest: tl.constexpr = -(LOWEST_DOUBLE if x.dtype == tl.float64 else LOWEST)
    return tl.minimum(x - tl.minimum(maximum, largest), 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger_of(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, axis: tl.constexpr):
    """The maximum along an axis; NaN if there is a NaN."""
    return tl.reduce(x, axis, larger_of)


@triton.jit
def same(x, maximum):
    """True where x equals maximum, the maximum of its group, or is NaN."""
    return (x == maximum) | (x != x)


@triton.jit
def merge_along(state, axis: tl.constexpr, MODE: tl.constexpr, WEIGHT: tl.constexpr, C: tl.constexpr):
    """Merges the states along one axis: of lanes in C, others `widened`. Sums are trees of a fixed shape. MOMENTS:

    (1) The new pivot is the mean of the pivots, weighted by |weights| or counts.
    (2) The new maximum is the largest of the maximums and of the distances to the new pivot.
    (3) Each state is moved to both (repivot), and added."""
    count, weights, pivot, shift, maximum, total = state
    if MODE == MOMENTS:
        held = count > 0
        high = tl.max(tl.where(held, pivot, float("-inf")), axis)
        low = tl.min(tl.where(held, pivot, float("inf")), axis)
        if WEIGHT:
            mass = tl.sum(tl.abs(weights), axis)
            parts = tl.abs(weights) / tl.expand_dims(tl.where(mass == 0, 1.0, mass), axis)
        else:
            parts = count / tl.expand_dims(tl.maximum(tl.sum(count, axis), 1.0), axis)
        middle = tl.sum(tl.where(held, parts * pivot, 0.0), axis).to(C)
        middle = tl.where(high == low, high, middle)  # exact where all elements are equal
        away = tl.where(held, pivot.to(total.dtype) - tl.expand_dims(middle, axis).to(total.dtype), 0.0)
        w = weights if WEIGHT else count
        larger = tl.max(tl.maximum(maximum, power_below(tl.abs(away).to(C))), axis)
        by = tl.expand_dims(reciprocal(larger), axis)
        total, shift = repivot(total, shift, w, maximum, away, by)
        shift = tl.sum(shift, axis)
        total = tl.sum(total, axis)
        pivot = middle
    elif MODE == SQUARES:
        larger = tl.max(maximum, axis)
        by = square((maximum * tl.expand_dims(reciprocal(larger), axis)).to(total.dtype))
        total = tl.sum(rounded_product(total, by), axis)
        shift = tl.sum(shift, axis)
        pivot = larger
    else:
        larger = largest(maximum, axis) if MODE == EXTREME else tl.max(maximum, axis)
        if MODE == EXPONENTIALS:
            by = exponential(less_maximum(maximum, tl.expand_dims(larger, axis))).to(total.dtype)
            total = rounded_product(total, by)
        elif MODE == EXTREME:
            total = tl.where(same(maximum, tl.expand_dims(larger, axis)), total, 0.0)
        total = tl.sum(total, axis)
        shift = tl.sum(shift, axis)
        pivot = larger
    return tl.sum(count, axis), tl.sum(weights, axis), pivot, shift, larger, total


@triton.jit
def merge(a, b, MODE: tl.constexpr, WEIGHT: tl.constexpr, C: tl.constexpr):
    joined = (
        tl.join(a[0], b[0]), tl.join(a[1], b[1]), tl.join(a[2], b[2]),
        tl.join(a[3], b[3]), tl.join(a[4], b[4]), tl.join(a[5], b[5]),
    )  # fmt: skip
    return merge_along(joined, 1, MODE, WEIGHT, C)


@triton.jit
def store_state(pointer, size, inside, state, MODE: tl.constexpr, WEIGHT: tl.constexpr):
    """Stores a split's state among the partials: one array of `size` numbers for each field that MODE needs."""
    count, weights, pivot, shift, maximum, total = state
    tl.store(pointer + size * COUNTS, count, mask=inside)
    if MODE != COUNT:
        tl.store(pointer + size * TOTALS, total, mask=inside)
    if MODE >= SQUARES:
        tl.store(pointer + size * MAXIMA, maximum, mask=inside)
    if MODE == MOMENTS:
        tl.store(pointer + size * SHIFTS, shift, mask=inside)
        tl.store(pointer + size * PIVOTS, pivot, mask=inside)
    if WEIGHT and (MODE == SQUARES or MODE == MOMENTS):
        tl.store(pointer + size * WEIGHTS, weights, mask=inside)


@triton.jit
def load_array(partial, offset, inside, USED: tl.constexpr):
    if USED:
        value = load(partial + offset, inside)
    else:
        value = inside.to(tl.float64) * 0
    return value


@triton.jit
def merge_partials(
    partial, splits, output, outputs, parts,
    MODE: tl.constexpr, WEIGHT: tl.constexpr, BS: tl.constexpr, BO: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Merges the first `parts` of an output's `splits` stored states, in their order, whichever block finished last."""
    WEIGHED: tl.constexpr = WEIGHT and (MODE == SQUARES or MODE == MOMENTS)
    size = splits * outputs
    state = empty_double_state([BO], MODE, C)
    for first in range(0, parts, BS):
        s = first + tl.arange(0, BS)
        inside = (s < parts)[:, None] & (output < outputs)[None, :]
        offset = (
            s[:, None] * outputs + output[None, :]
        )  # one for all arrays: an address for each took registers, and spilled
        count = load_array(partial + size * COUNTS, offset, inside, True)
        total = load_array(partial + size * TOTALS, offset, inside, MODE != COUNT)
        maximum = load_array(partial + size * MAXIMA, offset, inside, MODE >= SQUARES)
        maximum = tl.where(inside, maximum.to(C), lowest_maximum([1, 1], MODE, C))
        shift = load_array(partial + size * SHIFTS, offset, inside, MODE == MOMENTS)
        pivot = load_array(partial + size * PIVOTS, offset, inside, MODE == MOMENTS).to(C)
        weights = load_array(partial + size * WEIGHTS, offset, inside, WEIGHED)
        part = merge_along((count, weights, pivot, shift, maximum, total), 0, MODE, WEIGHT, C)
        state = merge(state, part, MODE, WEIGHT, C)
    return state

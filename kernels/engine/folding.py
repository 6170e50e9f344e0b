"""The folding skeleton: statistics that are more than a sum, such as a variance or a logarithm of exponentials.

Tiles, splits and the order of everything are those of reduction.py. What a lane, a block and a split carry is not one
number but a state of six, of which each MODE uses some:

    count     kept elements; MOMENTS with weights, of which it only matters whether there are any: the pivot's heaviness
    weights   the sum of their weights (SQUARES, MOMENTS, where there are weights)
    total     in the unit that `top` says:
              SQUARES      sum w x^2            = total top^2, top a power of two not below any |x|, or nearly
              MOMENTS      sum w (x - pivot)^2  = total top^2
              EXPONENTIAL  sum w exp(x)         = total exp(top), top the largest x
              EXTREME      top the largest x, total how many are equal to it
              ABSOLUTE     sum w |x|            = total
    pivot     MOMENTS: an element, from which deviations are taken; with weights, a lane's heaviest
    shift     MOMENTS: sum w (x - pivot). EXTREME: how many are NaN

Nothing overflows or underflows on the way to a result that does neither; and a variance loses no digits to a large
mean, since its pivot is one of the data: how far that lies from the others is part of their variance, unless its weight
is small beside theirs. States are combined by shifting to a common pivot and scaling to a common top.
"""

import triton
import triton.language as tl

from .indexing import fetch
from .reduction import ALL, COLUMNS, FLUSH, INNER, OUTER, ROWS
from .scaling import power_below, reciprocal

COUNTING, ABSOLUTE, SQUARES, EXPONENTIAL, EXTREME, MOMENTS = map(tl.constexpr, range(6))  # MODE
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOWEST_DOUBLE = tl.constexpr(-1.7976931348623157e308)
# The arrays of partials, each where its state needs it
KEPT, TOTAL, TOP, SHIFT, PIVOT, WEIGHTS = map(tl.constexpr, range(6))


@triton.jit
def neutral_top(shape: tl.constexpr, MODE: tl.constexpr, C: tl.constexpr):
    """The top of nothing, below every other (of dtype C)."""
    if MODE == EXTREME:
        top = tl.full(shape, float("-inf"), C)
    elif MODE == EXPONENTIAL:
        top = tl.full(shape, LOWEST_DOUBLE if C == tl.float64 else LOWEST, C)
    else:
        top = power_below(tl.zeros(shape, C))
    return top


@triton.jit
def finite_top(m):
    """The maximum of a group, where inf - inf would be NaN: then exp(x - top) is 0 for -inf, and inf for inf."""
    low = neutral_top([1, 1], EXPONENTIAL, m.dtype)
    m = tl.where(m > low, m, low)  # NaN too: the exponentials show it
    return tl.where(m < -low, m, -low)


@triton.jit
def square(x):
    return x * x


@triton.jit
def heaviness(w):
    """An int32 that grows with |w|, or stays: 0 of 0 alone, and the largest of NaN."""
    if w.dtype == tl.float64:
        heavy = (w.to(tl.int64, bitcast=True) >> 32).to(tl.int32) & 0x7FFFFFFF
        heavy = heavy | (w != 0).to(tl.int32)
    else:
        heavy = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return heavy


@triton.jit
def frequency(w):
    """w, and NaN where it is negative: by its sign bit, since a comparison takes registers that some kernels lack."""
    if w.dtype == tl.float64:
        bits = w.to(tl.int64, bitcast=True)
        found = (bits | ((bits >> 63) & 0x7FF8000000000000)).to(tl.float64, bitcast=True)
    else:
        bits = w.to(tl.int32, bitcast=True)
        found = (bits | ((bits >> 31) & 0x7FC00000)).to(tl.float32, bitcast=True)
    return found


@triton.jit
def about(total, shift, w, top, away, by):
    """The total about another pivot q, in the unit 1 / by; away: p - q.

    sum w (x - q)^2 = sum w (x - p)^2 + 2 (p - q) sum w (x - p) + (p - q)^2 sum w"""
    return total * square(top * by) + (2 * (shift * by) + w * (away * by)) * (away * by)


@triton.jit
def fold_tile(
    count, weights, pivot, shift, top, total, space, x, mask, weight, m, n,
    MODE: tl.constexpr, ABS: tl.constexpr, NEGATE: tl.constexpr,
    X: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the lanes' states. A lane takes the elements that one thread holds side by side: no data moves."""
    D: tl.constexpr = 2 - FOLD  # the dimension of a group within `shape`
    DOWN: tl.constexpr = BM // GROUP if FOLD == ROWS else BM
    MIDDLE: tl.constexpr = GROUP if FOLD == ROWS else BN // GROUP
    ACROSS: tl.constexpr = BN if FOLD == ROWS else GROUP
    SOME: tl.constexpr = EDGE or MASK or WEIGHT  # not all are kept

    keep = tl.full([BM, BN], True, tl.int1)
    if EDGE:
        keep = (m < space[0])[:, None] & (n < space[1])[None, :]
    if MASK:
        keep &= fetch(mask, space, m, n, keep, MASK, EDGE)
    if WEIGHT:
        w = fetch(weight, space, m, n, keep, WEIGHT, EDGE)
        if w.dtype != tl.float64:
            w = w.to(tl.float32)
        keep &= w != 0  # weight 0 means masked out; NaN is kept
        if MODE == MOMENTS:
            w = frequency(w)
        w = tl.reshape(tl.where(keep, w.to(C), 0.0), (DOWN, MIDDLE, ACROSS))
    if MODE != COUNTING:
        v = tl.broadcast_to(fetch(x, space, m, n, keep, X, EDGE).to(C), (BM, BN))
        if ABS:
            v = tl.abs(v)
        if NEGATE:
            v = -v
        v = tl.reshape(v, (DOWN, MIDDLE, ACROSS))
    keep = tl.reshape(keep, (DOWN, MIDDLE, ACROSS))
    kept = tl.sum(keep.to(tl.int32), D)

    if MODE == EXPONENTIAL:
        if SOME:
            v = tl.where(keep, v, float("-inf"))
        highest = finite_top(tl.max(v, D))
        terms = tl.exp(v - tl.expand_dims(highest, D))
        if WEIGHT:
            terms = terms * w
        larger = tl.maximum(top, highest)
        total = total * tl.exp(top - larger) + tl.sum(terms, D) * tl.exp(highest - larger)
        top = larger
    elif MODE == EXTREME:
        nan = v != v
        if SOME:
            nan = nan & keep
            v = tl.where(keep, v, float("-inf"))
        highest = tl.max(tl.where(nan, float("-inf"), v), D)
        ties = tl.sum(((v == tl.expand_dims(highest, D)) & keep).to(tl.int32), D).to(C)
        larger = tl.maximum(top, highest)
        total = tl.where(top == larger, total, 0.0) + tl.where(highest == larger, ties, 0.0)
        shift += tl.sum(nan.to(tl.int32), D).to(C)
        top = larger
    elif MODE == ABSOLUTE:
        if SOME:
            v = tl.where(keep, v, 0.0)
        if WEIGHT:
            v = v * w
        total += tl.sum(v, D)
    elif MODE == SQUARES or MODE == MOMENTS:
        if MODE == MOMENTS:  # deviations from an element, so that equal ones give exactly 0
            if WEIGHT:  # the heaviest yet
                heavy = heaviness(w)
                kept = tl.max(heavy, D)
                found = tl.max(tl.where(heavy == tl.expand_dims(kept, D), v, float("-inf")), D)
                heavier = kept > count
                away = tl.where(heavier & (count > 0), pivot - found, 0.0)
                pivot = tl.where(heavier, found, pivot)
                count = tl.maximum(count, kept)
                larger = tl.maximum(top, power_below(tl.abs(away)))
                total = about(total, shift, weights, top, away, reciprocal(larger))
                shift += weights * away
                weights += tl.sum(w, D)
                top = larger
            else:  # the first group's largest
                first = tl.max(tl.where(keep, v, float("-inf")), D)
                pivot = tl.where((count == 0) & (kept > 0), first, pivot)
            v = v - tl.expand_dims(pivot, D)
        if MODE == MOMENTS and WEIGHT:
            v = tl.where(w != 0, v, 0.0)  # as `keep`, which would take registers until here
        elif SOME:
            v = tl.where(keep, v, 0.0)
        if MODE == MOMENTS:
            if WEIGHT:
                shift += tl.sum(v * w, D)
            else:
                shift += tl.sum(v, D)
        unit = power_below(tl.max(tl.abs(v), D))
        terms = square(v * tl.expand_dims(reciprocal(unit), D))  # at most 4 but where |x| is inf or NaN: each shows
        if WEIGHT:
            terms = terms * w
            if MODE == SQUARES:
                weights += tl.sum(w, D)
        larger = tl.maximum(top, unit)
        by = reciprocal(larger)
        total = total * square(top * by) + tl.sum(terms, D) * square(unit * by)
        top = larger
    if not (MODE == MOMENTS and WEIGHT):
        count += kept
    return count, weights, pivot, shift, top, total


@triton.jit
def collapse(
    count, weights, pivot, shift, top, total,
    axis: tl.constexpr, MODE: tl.constexpr, WEIGHT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The states along one axis as one: of lanes in C, of larger parts in fp64. Sums are trees of a fixed shape."""
    if MODE == MOMENTS:
        held = count > 0
        high = tl.max(tl.where(held, pivot, float("-inf")), axis)
        low = tl.min(tl.where(held, pivot, float("inf")), axis)
        if WEIGHT:
            whole = tl.sum(tl.abs(weights), axis)
            parts = tl.abs(weights) / tl.expand_dims(tl.where(whole == 0, 1.0, whole), axis)
        else:
            parts = count / tl.expand_dims(tl.maximum(tl.sum(count, axis), 1.0), axis)
        middle = tl.sum(tl.where(held, parts * pivot, 0.0), axis)
        middle = tl.where(high == low, high, middle)  # exactly, where all elements are equal
        away = tl.where(held, pivot - tl.expand_dims(middle, axis), 0.0)
        w = weights if WEIGHT else count
        larger = tl.max(tl.maximum(top, power_below(tl.abs(away))), axis)
        by = tl.expand_dims(reciprocal(larger), axis)
        total = about(total, shift, w, top, away, by)
        shift = tl.sum(shift + w * away, axis)
        total = tl.sum(total, axis)
        pivot = middle
    elif MODE == SQUARES:
        larger = tl.max(top, axis)
        total = tl.sum(total * square(top * tl.expand_dims(reciprocal(larger), axis)), axis)
        shift = tl.sum(shift, axis)
        pivot = shift
    else:
        larger = tl.max(top, axis)
        if MODE == EXPONENTIAL:
            total = total * tl.exp((top - tl.expand_dims(larger, axis)).to(C)).to(total.dtype)
        elif MODE == EXTREME:
            total = tl.where(top == tl.expand_dims(larger, axis), total, 0.0)
        total = tl.sum(total, axis)
        shift = tl.sum(shift, axis)
        pivot = shift
    weights = tl.sum(weights, axis)
    return tl.sum(count, axis), weights, pivot, shift, larger, total


@triton.jit
def combine(
    count, weights, pivot, shift, top, total, count1, weights1, pivot1, shift1, top1, total1,
    MODE: tl.constexpr, WEIGHT: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    return collapse(
        tl.join(count, count1), tl.join(weights, weights1), tl.join(pivot, pivot1), tl.join(shift, shift1),
        tl.join(top, top1), tl.join(total, total1), 1, MODE, WEIGHT, C,
    )  # fmt: skip


@triton.jit
def fold_tiles(
    first, last, block, space, x, mask, weight,
    MODE: tl.constexpr, ABS: tl.constexpr, NEGATE: tl.constexpr,
    X: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """The state of tiles [first, last), at most FLUSH of them; one fp64 entry per output."""
    DOWN: tl.constexpr = GROUP if FOLD == ROWS else BM  # the lanes' shape
    ACROSS: tl.constexpr = BN if FOLD == ROWS else (GROUP if FOLD == COLUMNS else BN // GROUP)
    count = tl.zeros([DOWN, ACROSS], tl.int32)
    weights = tl.zeros([DOWN, ACROSS], C)
    pivot = tl.zeros([DOWN, ACROSS], C)
    shift = tl.zeros([DOWN, ACROSS], C)
    total = tl.zeros([DOWN, ACROSS], C)
    top = neutral_top([DOWN, ACROSS], MODE, C)
    for t in range(first, last):
        if AXIS == OUTER:
            m0, n0 = t * BM, block * BN
        elif AXIS == INNER:
            m0, n0 = block * BM, t * BN
        else:
            across = (space[1] + BN - 1) // BN
            m0, n0 = t // across * BM, t % across * BN
        m = m0 + tl.arange(0, BM).to(I)
        n = tl.max_contiguous(n0 + tl.arange(0, BN).to(I), VEC)  # 16 bytes of data per access, as in reduction.py
        if VEC == 1:
            whole = False
        else:
            whole = (m0 + BM <= space[0]) & (n0 + BN <= space[1])
        if whole:  # needs no bounds
            count, weights, pivot, shift, top, total = fold_tile(
                count, weights, pivot, shift, top, total, space, x, mask, weight, m, n,
                MODE, ABS, NEGATE, X, MASK, WEIGHT, BM, BN, FOLD, GROUP, C, False,
            )  # fmt: skip
        else:
            count, weights, pivot, shift, top, total = fold_tile(
                count, weights, pivot, shift, top, total, space, x, mask, weight, m, n,
                MODE, ABS, NEGATE, X, MASK, WEIGHT, BM, BN, FOLD, GROUP, C, True,
            )  # fmt: skip
    if AXIS == ALL:
        count, weights = tl.reshape(count, (1, DOWN * ACROSS)), tl.reshape(weights, (1, DOWN * ACROSS))
        pivot, shift = tl.reshape(pivot, (1, DOWN * ACROSS)), tl.reshape(shift, (1, DOWN * ACROSS))
        top, total = tl.reshape(top, (1, DOWN * ACROSS)), tl.reshape(total, (1, DOWN * ACROSS))
    ALONG: tl.constexpr = 0 if AXIS == OUTER else 1
    count, weights, pivot, shift, top, total = collapse(
        count.to(C), weights, pivot, shift, top, total, ALONG, MODE, WEIGHT, C
    )
    count, weights, pivot = count.to(tl.float64), weights.to(tl.float64), pivot.to(tl.float64)
    return count, weights, pivot, shift.to(tl.float64), top.to(tl.float64), total.to(tl.float64)


@triton.jit
def fold_range(
    first, last, block, space, x, mask, weight,
    MODE: tl.constexpr, ABS: tl.constexpr, NEGATE: tl.constexpr,
    X: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """The state of any number of tiles."""
    BO: tl.constexpr = BN if AXIS == OUTER else (BM if AXIS == INNER else 1)
    if LONG:
        count = tl.zeros([BO], tl.float64)
        weights = tl.zeros([BO], tl.float64)
        pivot = tl.zeros([BO], tl.float64)
        shift = tl.zeros([BO], tl.float64)
        total = tl.zeros([BO], tl.float64)
        top = neutral_top([BO], MODE, C).to(tl.float64)
        for start in range(first, last, FLUSH):
            count1, weights1, pivot1, shift1, top1, total1 = fold_tiles(
                start, tl.minimum(start + FLUSH, last), block, space, x, mask, weight,
                MODE, ABS, NEGATE, X, MASK, WEIGHT, AXIS, BM, BN, FOLD, GROUP, VEC, C, I,
            )  # fmt: skip
            count, weights, pivot, shift, top, total = combine(
                count, weights, pivot, shift, top, total, count1, weights1, pivot1, shift1, top1, total1,
                MODE, WEIGHT, C,
            )  # fmt: skip
    else:
        count, weights, pivot, shift, top, total = fold_tiles(
            first, last, block, space, x, mask, weight,
            MODE, ABS, NEGATE, X, MASK, WEIGHT, AXIS, BM, BN, FOLD, GROUP, VEC, C, I,
        )  # fmt: skip
    return count, weights, pivot, shift, top, total


@triton.jit
def leave(
    where, size, inside, count, weights, pivot, shift, top, total, MODE: tl.constexpr, WEIGHED: tl.constexpr
):  # fmt: skip
    """A split's state among the partials, in arrays of `size`."""
    tl.store(where + size * KEPT, count, mask=inside)
    if MODE != COUNTING:
        tl.store(where + size * TOTAL, total, mask=inside)
    if MODE >= SQUARES:
        tl.store(where + size * TOP, top, mask=inside)
    if MODE >= EXTREME:
        tl.store(where + size * SHIFT, shift, mask=inside)
    if MODE == MOMENTS:
        tl.store(where + size * PIVOT, pivot, mask=inside)
    if WEIGHED:
        tl.store(where + size * WEIGHTS, weights, mask=inside)


@triton.jit
def load_partials(partial, size, where, inside, A: tl.constexpr, USED: tl.constexpr):
    """One array of partials. .cg: from L2, where the other blocks' stores are; L1 may hold an earlier launch's."""
    if USED:
        value = tl.load(partial + size * A + where, mask=inside, other=0.0, cache_modifier=".cg")
    else:
        value = inside.to(tl.float64) * 0
    return value


@triton.jit
def gather(
    partial, splits, kept, outputs,
    MODE: tl.constexpr, WEIGHT: tl.constexpr, BS: tl.constexpr, BO: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The state of all splits, in order of split whoever wrote last."""
    size = splits * outputs
    count = tl.zeros([BO], tl.float64)
    weights = tl.zeros([BO], tl.float64)
    pivot = tl.zeros([BO], tl.float64)
    shift = tl.zeros([BO], tl.float64)
    total = tl.zeros([BO], tl.float64)
    top = neutral_top([BO], MODE, C).to(tl.float64)
    for start in range(0, splits, BS):
        s = start + tl.arange(0, BS)
        inside = (s < splits)[:, None] & (kept < outputs)[None, :]
        where = s[:, None] * outputs + kept[None, :]
        count1 = load_partials(partial, size, where, inside, KEPT, True)
        total1 = load_partials(partial, size, where, inside, TOTAL, MODE != COUNTING)
        top1 = load_partials(partial, size, where, inside, TOP, MODE >= SQUARES)
        top1 = tl.where(inside, top1, neutral_top([1, 1], MODE, C).to(tl.float64))
        shift1 = load_partials(partial, size, where, inside, SHIFT, MODE >= EXTREME)
        pivot1 = load_partials(partial, size, where, inside, PIVOT, MODE == MOMENTS)
        weights1 = load_partials(partial, size, where, inside, WEIGHTS, WEIGHT and (MODE == SQUARES or MODE == MOMENTS))
        count1, weights1, pivot1, shift1, top1, total1 = collapse(
            count1, weights1, pivot1, shift1, top1, total1, 0, MODE, WEIGHT, C
        )
        count, weights, pivot, shift, top, total = combine(
            count, weights, pivot, shift, top, total, count1, weights1, pivot1, shift1, top1, total1, MODE, WEIGHT, C
        )
    return count, weights, pivot, shift, top, total

"""Elements added to states (state.py), on the tiles, splits and lanes of sums.py: the inner loop of the statistics, and
of the rows that are too long for one tile.
"""

import triton
import triton.language as tl

from .indexing import ALL, INNER, OUTER, VECTOR
from .scaling import power_below, reciprocal
from .state import (
    ABSOLUTE,
    COUNT,
    EXPONENTIALS,
    EXTREME,
    MOMENTS,
    SQUARES,
    about,
    below,
    empty_double_state,
    empty_state,
    larger_of,
    largest,
    lowest_top,
    merge,
    merge_along,
    same,
    square,
)
from .tile import corner, fetch, indices, is_whole, kept, offset_of
from .tiling import COLUMNS, FLUSH, ROWS, VECTORS


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
def nan_if_negative(w):
    """w, and NaN where it is negative: by its sign bit, since a comparison takes registers that some kernels lack."""
    if w.dtype == tl.float64:
        bits = w.to(tl.int64, bitcast=True)
        found = (bits | ((bits >> 63) & 0x7FF8000000000000)).to(tl.float64, bitcast=True)
    else:
        bits = w.to(tl.int32, bitcast=True)
        found = (bits | ((bits >> 31) & 0x7FC00000)).to(tl.float32, bitcast=True)
    return found


@triton.jit
def add_exponentials(state, v, keep, w, along: tl.constexpr, SOME: tl.constexpr, WEIGHT: tl.constexpr):
    count, weights, pivot, shift, top, total = state
    if SOME:
        v = tl.where(keep, v, float("-inf"))
    highest, low = tl.max(v, along), lowest_top([1, 1], EXPONENTIALS, v.dtype)
    highest = tl.where(highest > low, highest, low)  # -inf - (-inf) would be NaN; and NaN: the exponentials show it
    terms = tl.exp(below(v, tl.expand_dims(highest, along)))
    if WEIGHT:
        terms = terms * w
    larger = tl.maximum(top, highest)
    total = total * tl.exp(below(top, larger)) + tl.sum(terms, along) * tl.exp(below(highest, larger))
    return count, weights, pivot, shift, larger, total


@triton.jit
def add_extreme(state, v, keep, along: tl.constexpr, SOME: tl.constexpr, C: tl.constexpr):
    count, weights, pivot, shift, top, total = state
    if SOME:
        v = tl.where(keep, v, float("-inf"))
    highest = largest(v, along)
    ties = tl.sum((same(v, tl.expand_dims(highest, along)) & keep).to(tl.int32), along)
    larger = larger_of(top, highest)
    total = tl.where(same(top, larger), total, 0.0) + tl.where(same(highest, larger), ties.to(C), 0.0)
    return count, weights, pivot, shift, larger, total


@triton.jit
def move_pivot(state, v, keep, w, added, along: tl.constexpr, WEIGHT: tl.constexpr):
    """MOMENTS: the state about the pivot that the group's elements call for, of which it has taken only the weights.

    Deviations are from an element, so that those of equal elements are exactly 0."""
    count, weights, pivot, shift, top, total = state
    if WEIGHT:  # the heaviest yet
        heavy = heaviness(w)
        heaviest = tl.max(heavy, along)
        found = tl.max(tl.where(heavy == tl.expand_dims(heaviest, along), v, float("-inf")), along)
        heavier = heaviest > count
        away = tl.where(heavier & (count > 0), pivot - found, 0.0)
        pivot = tl.where(heavier, found, pivot)
        count = tl.maximum(count, heaviest)
        larger = tl.maximum(top, power_below(tl.abs(away)))
        total = about(total, shift, weights, top, away, reciprocal(larger))
        shift += weights * away
        weights += tl.sum(w, along)
        top = larger
    else:  # the first group's largest
        first = tl.max(tl.where(keep, v, float("-inf")), along)
        pivot = tl.where((count == 0) & (added > 0), first, pivot)
    return count, weights, pivot, shift, top, total


@triton.jit
def add_squares(state, v, w, along: tl.constexpr, WEIGHT: tl.constexpr):
    """v: elements, or their deviations, 0 where not kept."""
    count, weights, pivot, shift, top, total = state
    unit = power_below(tl.max(tl.abs(v), along))
    terms = square(v * tl.expand_dims(reciprocal(unit), along))  # at most 4 but where |v| is inf or NaN: each shows
    if WEIGHT:
        terms = terms * w
    larger = tl.maximum(top, unit)
    by = reciprocal(larger)
    total = total * square(top * by) + tl.sum(terms, along) * square(unit * by)
    return count, weights, pivot, shift, larger, total


@triton.jit
def add_tile(
    state, space, x, mask, weight, m, n,
    MODE: tl.constexpr, ABS: tl.constexpr, NEGATE: tl.constexpr,
    X: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds a tile to the lanes' states. A lane takes the elements that one thread holds side by side: no data moves."""
    ALONG: tl.constexpr = 2 - LANES  # the dimension of a lane's elements, within (DOWN, MIDDLE, ACROSS)
    DOWN: tl.constexpr = BM // GROUP if LANES == ROWS else BM
    MIDDLE: tl.constexpr = GROUP if LANES == ROWS else BN // GROUP
    ACROSS: tl.constexpr = BN if LANES == ROWS else GROUP
    SOME: tl.constexpr = EDGE or MASK or WEIGHT  # not all are kept

    keep, w = kept(space, mask, weight, m, n, MASK, WEIGHT, BM, BN, EDGE)
    if WEIGHT:
        if MODE == MOMENTS:
            w = nan_if_negative(w)
        w = tl.reshape(tl.where(keep, w.to(C), 0.0), (DOWN, MIDDLE, ACROSS))
    if MODE != COUNT:
        v = tl.broadcast_to(fetch(x, space, m, n, keep, X, EDGE).to(C), (BM, BN))
        if ABS:
            v = tl.abs(v)
        if NEGATE:
            v = -v
        v = tl.reshape(v, (DOWN, MIDDLE, ACROSS))
    keep = tl.reshape(keep, (DOWN, MIDDLE, ACROSS))
    added = tl.sum(keep.to(tl.int32), ALONG)

    if MODE == EXPONENTIALS:
        state = add_exponentials(state, v, keep, w, ALONG, SOME, WEIGHT)
    elif MODE == EXTREME:
        state = add_extreme(state, v, keep, ALONG, SOME, C)
    elif MODE == MOMENTS:
        state = move_pivot(state, v, keep, w, added, ALONG, WEIGHT)
        v = v - tl.expand_dims(state[2], ALONG)
        if WEIGHT:
            v = tl.where(w != 0, v, 0.0)  # as `keep`, which would take registers until here
        elif SOME:
            v = tl.where(keep, v, 0.0)
        count, weights, pivot, shift, top, total = state
        shift += tl.sum(v * w if WEIGHT else v, ALONG)
        state = add_squares((count, weights, pivot, shift, top, total), v, w, ALONG, WEIGHT)
    elif MODE == ABSOLUTE or MODE == SQUARES:
        if SOME:
            v = tl.where(keep, v, 0.0)
        if MODE == SQUARES:
            state = add_squares(state, v, w, ALONG, WEIGHT)
        count, weights, pivot, shift, top, total = state
        if MODE == ABSOLUTE:
            total += tl.sum(v * w if WEIGHT else v, ALONG)
        elif WEIGHT:
            weights += tl.sum(w, ALONG)
        state = (count, weights, pivot, shift, top, total)
    count, weights, pivot, shift, top, total = state
    if MODE != EXTREME and not (MODE == MOMENTS and WEIGHT):
        count += added
    return count, weights, pivot, shift, top, total


@triton.jit
def count_bytes(
    mask, space, m0, n0, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr, I: tl.constexpr
):
    """How many of each lane's GROUP bytes of a mask are not 0, four at a time: one by one they take five times the
    instructions."""
    m = m0 + tl.arange(0, BM).to(I)
    n = tl.max_contiguous(n0 // 4 + tl.arange(0, BN // 4).to(I), VEC // 4)
    row = offset_of(m, space[2], mask[1]) // 4
    words = tl.load(mask[0].to(tl.pointer_type(tl.uint32)) + row[:, None] + n[None, :])
    ones = (
        (((words & 0x7F7F7F7F) + 0x7F7F7F7F) | words) >> 7
    ) & 0x01010101  # in each byte 1, if any of its bits is set
    sums = tl.sum(tl.reshape(ones, (BM, BN // GROUP, GROUP // 4)), 2)
    sums += sums >> 16
    return ((sums + (sums >> 8)) & 0xFF).to(tl.int32)


@triton.jit
def add_tiles(
    first, last, block, space, x, mask, weight,
    MODE: tl.constexpr, ABS: tl.constexpr, NEGATE: tl.constexpr,
    X: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """The state of tiles [first, last), at most FLUSH of them; one fp64 entry per output."""
    DOWN: tl.constexpr = GROUP if LANES == ROWS else BM  # the lanes' shape
    ACROSS: tl.constexpr = BN if LANES == ROWS else (GROUP if LANES == COLUMNS else BN // GROUP)
    BYTES: tl.constexpr = MODE == COUNT and WEIGHT == 0 and MASK == VECTOR and LANES == VECTORS and VEC == 16
    state = empty_state([DOWN, ACROSS], MODE, C, tl.int32)
    for t in range(first, last):
        m0, n0 = corner(space, block, t, AXIS, BM, BN)
        m, n = indices(m0, n0, BM, BN, VEC, I)
        if VEC == 1:
            whole = False
        else:
            whole = is_whole(space, m0, n0, BM, BN)
        if whole and BYTES:
            added = count_bytes(mask, space, m0, n0, BM, BN, GROUP, VEC, I)
            state = (state[0] + added, state[1], state[2], state[3], state[4], state[5])
        elif whole:  # needs no bounds
            state = add_tile(
                state, space, x, mask, weight, m, n,
                MODE, ABS, NEGATE, X, MASK, WEIGHT, BM, BN, LANES, GROUP, C, False,
            )  # fmt: skip
        else:
            state = add_tile(
                state, space, x, mask, weight, m, n,
                MODE, ABS, NEGATE, X, MASK, WEIGHT, BM, BN, LANES, GROUP, C, True,
            )  # fmt: skip
    count = state[5] if MODE == EXTREME else state[0].to(C)
    state = (count, state[1], state[2], state[3], state[4], state[5])
    if AXIS == ALL:
        state = tl.tuple([tl.reshape(s, (1, DOWN * ACROSS)) for s in state])
    state = merge_along(state, 0 if AXIS == OUTER else 1, MODE, WEIGHT, C)
    return tl.tuple([s.to(tl.float64) for s in state])


@triton.jit
def add_range(
    first, last, block, space, x, mask, weight,
    MODE: tl.constexpr, ABS: tl.constexpr, NEGATE: tl.constexpr,
    X: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """The state of any number of tiles."""
    BO: tl.constexpr = BN if AXIS == OUTER else (BM if AXIS == INNER else 1)
    if LONG:
        state = empty_double_state([BO], MODE, C)
        for start in range(first, last, FLUSH):
            some = add_tiles(
                start, tl.minimum(start + FLUSH, last), block, space, x, mask, weight,
                MODE, ABS, NEGATE, X, MASK, WEIGHT, AXIS, BM, BN, LANES, GROUP, VEC, C, I,
            )  # fmt: skip
            state = merge(state, some, MODE, WEIGHT, C)
    else:
        state = add_tiles(
            first, last, block, space, x, mask, weight,
            MODE, ABS, NEGATE, X, MASK, WEIGHT, AXIS, BM, BN, LANES, GROUP, VEC, C, I,
        )  # fmt: skip
    return state

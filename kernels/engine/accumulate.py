"""The inner loop of the statistics, and of rows too long for one tile: adds elements to states (state.py: the sums that
a lane keeps). Tiles, splits and lanes are those of sums.py.
"""

import triton
import triton.language as tl

from .indexing import ALL, INNER, OUTER, VECTOR
from .math import exponential
from .scaling import power_below, reciprocal
from .state import (
    ABSOLUTE,
    COUNT,
    EXPONENTIALS,
    EXTREME,
    MOMENTS,
    SQUARES,
    empty_double_state,
    empty_state,
    larger_of,
    largest,
    less_maximum,
    merge,
    merge_along,
    repivot,
    same,
    square,
    widened,
)
from .tile import at_column, both_by_lane, by_lane, corner, fetch, indices, is_whole, kept, offset_of, split_by_lane
from .tiling import FLUSH


@triton.jit
def heaviness(w):
    """An int32 that never decreases as |w| grows: 0 for w = 0 alone, and the largest for NaN."""
    if w.dtype == tl.float64:
        heavy = (w.to(tl.int64, bitcast=True) >> 32).to(tl.int32) & 0x7FFFFFFF
        heavy = heavy | (w != 0).to(tl.int32)
    else:
        heavy = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return heavy


@triton.jit
def nan_if_negative(w):
    """w, or NaN where its sign bit is set. A comparison would take registers that some kernels lack."""
    if w.dtype == tl.float64:
        bits = w.to(tl.int64, bitcast=True)
        result = (bits | ((bits >> 63) & 0x7FF8000000000000)).to(tl.float64, bitcast=True)
    else:
        bits = w.to(tl.int32, bitcast=True)
        result = (bits | ((bits >> 31) & 0x7FC00000)).to(tl.float32, bitcast=True)
    return result


@triton.jit
def add_exponentials(state, v, keep, w, along: tl.constexpr, SOME: tl.constexpr, WEIGHT: tl.constexpr):
    count, weights, pivot, shift, maximum, total = state
    if SOME:
        v = tl.where(keep, v, float("-inf"))
    larger = tl.maximum(
        maximum, tl.max(v, along)
    )  # finite or inf. tl.max ignores a NaN, but the exponentials turn it into a NaN total
    terms = exponential(less_maximum(v, tl.expand_dims(larger, along)))
    if WEIGHT:
        terms = terms * w
    total = total * exponential(less_maximum(maximum, larger)) + tl.sum(terms, along)
    return count, weights, pivot, shift, larger, total


@triton.jit
def add_extreme(state, v, keep, along: tl.constexpr, SOME: tl.constexpr, C: tl.constexpr):
    count, weights, pivot, shift, maximum, total = state
    if SOME:
        v = tl.where(keep, v, float("-inf"))
    larger = larger_of(maximum, largest(v, along))
    ties = tl.sum(tl.where(same(v, tl.expand_dims(larger, along)), 1.0, 0.0), along)
    return count, weights, pivot, shift, larger, tl.where(same(maximum, larger), total, 0.0) + ties


@triton.jit
def move_pivot(state, v, keep, w, added, missing, along: tl.constexpr, WEIGHT: tl.constexpr, EDGE: tl.constexpr):
    """MOMENTS: chooses the pivot for a group of elements and moves the state to it. Adds the elements' weights;
    add_squares then adds the elements. Returns (state, True if any lane has no pivot yet).

    A pivot is an element, so that the deviations of equal elements are exactly 0."""
    count, weights, pivot, shift, maximum, total = state
    if WEIGHT:  # the pivot is the heaviest element so far
        heavy = heaviness(w)
        heaviest = tl.max(heavy, along)
        result = tl.max(tl.where(heavy == tl.expand_dims(heaviest, along), v, float("-inf")), along)
        heavier = heaviest > count
        away = tl.where(heavier & (count > 0), pivot - result, 0.0)
        pivot = tl.where(heavier, result, pivot)
        count = tl.maximum(count, heaviest)
        larger = tl.maximum(maximum, power_below(tl.abs(away)))
        total, shift = repivot(total, shift, weights, maximum, away, reciprocal(larger))
        weights += tl.sum(w, along)
        maximum = larger
    elif EDGE and missing:  # the pivot is the largest element of the first group that keeps any
        first = tl.max(tl.where(keep, v, float("-inf")), along)
        pivot = tl.where((count == 0) & (added > 0), first, pivot)
        missing = tl.min(tl.min(count + added, 1), 0) == 0
    return (count, weights, pivot, shift, maximum, total), missing


@triton.jit
def add_squares(state, v, w, along: tl.constexpr, MODE: tl.constexpr, WEIGHT: tl.constexpr):
    """Adds v^2 to `total` and, for MOMENTS, v to `shift`. v: the elements, or for MOMENTS their deviations from the
    pivot; 0 where not kept."""
    count, weights, pivot, shift, maximum, total = state
    larger = tl.maximum(maximum, power_below(tl.max(tl.abs(v), along)))
    by = reciprocal(larger)
    v = v * tl.expand_dims(by, along)  # |v| < 2, or inf or NaN, which the sums show
    terms = square(v)
    if WEIGHT:
        terms = terms * w
    if MODE == MOMENTS:
        shift = shift * (maximum * by) + tl.sum(v * w if WEIGHT else v, along)
    total = total * square(maximum * by) + tl.sum(terms, along)
    return count, weights, pivot, shift, larger, total


@triton.jit
def add_tile(state, missing, x, mask, weight, space, m, n, config, MODE: tl.constexpr, ABS: tl.constexpr,
             NEGATE: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    """Adds a tile to the states of the lanes (LM, LN). Returns (state, missing: True if any lane has no pivot yet)."""
    C: tl.constexpr = config.C
    WEIGHT: tl.constexpr = weight is not None
    SOME: tl.constexpr = EDGE or mask is not None or WEIGHT  # some elements may not be kept

    keep, w = kept(mask, weight, space, m, n, config, EDGE)  # (BM, BN)
    if WEIGHT:
        if MODE == MOMENTS:
            w = nan_if_negative(w)
        w = by_lane(tl.where(keep, w.to(C), 0.0), config)  # (LM, LN, elements of a thread), like v and keep below
    if MODE != COUNT:
        v, keep = both_by_lane(fetch(x, space, m, n, keep, EDGE).to(C), keep, config)
        if ABS:
            v = tl.abs(v)
        if NEGATE:
            v = -v
    else:
        keep = by_lane(keep, config)
    added = float(config.BM * config.BN // (config.LM * config.LN))
    if SOME:
        added = tl.sum(tl.where(keep, 1.0, 0.0), 2)  # (in fp32: for integers LLVM's code counts bit by bit)

    if MODE == EXPONENTIALS:
        state = add_exponentials(state, v, keep, w, 2, SOME, WEIGHT)
    elif MODE == EXTREME:
        state = add_extreme(state, v, keep, 2, SOME, C)
    elif MODE == MOMENTS:
        state, missing = move_pivot(state, v, keep, w, added, missing, 2, WEIGHT, EDGE)
        v = v - tl.expand_dims(state[2], 2)
        if WEIGHT:
            v = tl.where(w != 0, v, 0.0)  # w != 0 equals `keep`, which would hold registers until here
        elif SOME:
            v = tl.where(keep, v, 0.0)
        state = add_squares(state, v, w, 2, MODE, WEIGHT)
    elif MODE == ABSOLUTE or MODE == SQUARES:
        if SOME:
            v = tl.where(keep, v, 0.0)
        if MODE == SQUARES:
            state = add_squares(state, v, w, 2, MODE, WEIGHT)
        count, weights, pivot, shift, maximum, total = state
        if MODE == ABSOLUTE:
            total += tl.sum(v * w if WEIGHT else v, 2)
        elif WEIGHT:
            weights += tl.sum(w, 2)
        state = (count, weights, pivot, shift, maximum, total)
    count, weights, pivot, shift, maximum, total = state
    if not (MODE == MOMENTS and WEIGHT):
        count += added
    return (count, weights, pivot, shift, maximum, total), missing


@triton.jit
def count_bytes(mask, space, m0, n0, config):
    """Counts the bytes of a mask that are not 0, for each lane: (LM, LN). Four bytes are loaded as one word: byte by
    byte takes five times the instructions."""
    m = m0 + tl.arange(0, config.BM).to(config.I)
    n = tl.max_contiguous(n0 // 4 + tl.arange(0, config.BN // 4).to(config.I), config.VEC // 4)
    row = offset_of(m, space.outer_shape, mask.outer) // 4
    words = tl.load(mask.pointer.to(tl.pointer_type(tl.uint32)) + row[:, None] + n[None, :])  # (BM, BN / 4)
    ones = ((((words & 0x7F7F7F7F) + 0x7F7F7F7F) | words) >> 7) & 0x01010101  # 1 in each byte that has any bit set
    sums = tl.sum(split_by_lane(ones, config.BM, config.BN // 4, config.VEC // 4, config), 2)
    sums += sums >> 16
    return ((sums + (sums >> 8)) & 0xFF).to(tl.float32)


@triton.jit
def add_tiles(
    first, last, block, x, mask, weight, space, config, MODE: tl.constexpr, ABS: tl.constexpr, NEGATE: tl.constexpr
):
    """The state of tiles [first, last), at most FLUSH of them, merged over lanes, in fp64: one entry per output."""
    AXIS: tl.constexpr = config.AXIS
    VEC: tl.constexpr = config.VEC
    C: tl.constexpr = config.C
    WEIGHT: tl.constexpr = weight is not None
    BYTES: tl.constexpr = (
        MODE == COUNT and not WEIGHT and mask.kind == VECTOR and VEC == 16 and config.LN * VEC <= config.BN
    )
    state = empty_state([config.LM, config.LN], MODE, C, tl.int32 if MODE == MOMENTS and WEIGHT else tl.float32)
    missing = first < last
    for t in range(first, last):
        m0, n0 = corner(space, block, t, config)
        m, n = indices(m0, n0, config)
        here = at_column(space, n0)
        if VEC == 1:
            in_bounds = False
        else:
            in_bounds = is_whole(space, m0, n0, config)
            if MODE == MOMENTS and not WEIGHT:
                in_bounds &= ~missing
        if in_bounds and BYTES:
            added = count_bytes(mask, space, m0, n0, config)
            state = (state[0] + added, state[1], state[2], state[3], state[4], state[5])
        elif in_bounds:
            state, missing = add_tile(state, missing, x, mask, weight, here, m, n, config, MODE, ABS, NEGATE, False)
        else:
            state, missing = add_tile(state, missing, x, mask, weight, here, m, n, config, MODE, ABS, NEGATE, True)
    count, weights, pivot, shift, maximum, total = state
    if MODE == EXTREME:  # elements not kept were set to -inf, and must not count as ties
        total = tl.where(maximum == float("-inf"), count.to(C), total)
    state = (count.to(C), weights, pivot, shift, maximum, total)
    state = merge_along(state, 0 if AXIS == OUTER else 1, MODE, WEIGHT, C)
    if AXIS == ALL:  # in two steps: if all lanes are reshaped to one row, Triton 3.6 merges the wrong ones
        state = merge_along(tl.tuple([tl.expand_dims(s, 1) for s in state]), 0, MODE, WEIGHT, C)
    return widened(state)


@triton.jit
def add_range(first, last, block, x, mask, weight, space, config, MODE: tl.constexpr, ABS: tl.constexpr = False,
              NEGATE: tl.constexpr = False):  # fmt: skip
    """Returns the state of tiles [first, last), any number of tiles: one entry per output."""
    AXIS: tl.constexpr = config.AXIS
    BO: tl.constexpr = config.BN if AXIS == OUTER else (config.BM if AXIS == INNER else 1)
    if config.LONG:
        state = empty_double_state([BO], MODE, config.C)
        for start in range(first, last, FLUSH):
            more = add_tiles(
                start, tl.minimum(start + FLUSH, last), block, x, mask, weight, space, config, MODE, ABS, NEGATE
            )
            state = merge(state, more, MODE, weight is not None, config.C)
    else:
        state = add_tiles(first, last, block, x, mask, weight, space, config, MODE, ABS, NEGATE)
    return state

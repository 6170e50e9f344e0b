"""The sums over the classes of a row that its cross entropy needs, in one read of its logits.

A state is (top, total, mass, cross, count, every, moment):

    top      the largest logit
    total    sum exp(x - top); where top is inf, how many logits are inf
    mass     sum w q, for class probabilities q and class weights w
    cross    sum w q (x - top); for the row's entropy, sum exp(x - top) (x - top)
    count    how many classes exist: their logit is not -inf. Needed for label smoothing, like the next two
    every    the sum of w over the classes that exist; without weights `count` serves
    moment   sum w (x - top) over the classes that exist

With ARGMAX, `count` is the largest logit as it is, NaN above all others, and `every` the first class that has it. Sums
of x are relative to the maximum: large logits that differ by little would cancel. A lane has the state of the elements
that one thread holds, as in engine/accumulate.py, but with more sums than the states there.
"""

import triton
import triton.language as tl

from ..engine.blocks import load_partials
from ..engine.indexing import INNER, PEELED, STRIDED, VECTOR
from ..engine.math import exponential, rounded_product
from ..engine.row import summed_tile
from ..engine.state import EXPONENTIALS, largest, less_top, lowest_top, same
from ..engine.tile import by_lane, corner, fetch, within
from .logits import shaped

SUMS = tl.constexpr(7)
BEST, BEST_CLASS = tl.constexpr(4), tl.constexpr(5)  # with ARGMAX: `count` and `every`


@triton.jit
def empty_state(shape: tl.constexpr, DTYPE: tl.constexpr, config):
    """The state of no elements, in dtype DTYPE."""
    zero = tl.zeros(shape, DTYPE)
    count, every = zero, zero
    if config.ARGMAX:  # (a row of -inf alone has class 0)
        count, every = zero + float("-inf"), zero.to(tl.float64 if DTYPE == tl.float64 else config.I)
    return lowest_top(shape, EXPONENTIALS, config.C).to(DTYPE), zero, zero, zero, count, every, zero


@triton.jit
def shrink(top, larger, C: tl.constexpr):
    """exp(top - larger), in C; 1 where both are inf."""
    return tl.where(top == larger, 1.0, exponential((top - larger).to(C)).to(top.dtype))


@triton.jit
def move(weights, top, larger):
    """The gain of a sum of w (x - top) when the maximum grows. (A lane without elements has the lowest maximum.)"""
    return tl.where(weights == 0, 0.0, weights * (top - larger))


@triton.jit
def moved_moment(moment, total, top, larger, by):
    """sum exp(x - top) (x - top), moved to a maximum that grows; by: exp(top - larger)."""
    return rounded_product(by, moment + move(total, top, larger))


@triton.jit
def add_best(best, index, x, first, config):
    """Returns (largest logit, its class) per lane, after a tile x (tile.by_lane): (LM, LN, elements of a thread).
    first: the first class of the tile."""
    LN: tl.constexpr = config.LN
    SIDE: tl.constexpr = config.VEC if LN * config.VEC <= config.BN else config.BN // LN
    highest = largest(x, 2)
    here = same(x, tl.expand_dims(highest, 2))
    place = tl.min(tl.where(here, tl.arange(0, x.shape[2])[None, None, :], x.shape[2]), 2)
    if config.AXIS == INNER:
        place = (place // SIDE * LN + tl.arange(0, LN)[None, :]) * SIDE + place % SIDE
    else:
        place = place * config.LM + tl.arange(0, config.LM)[:, None]
    larger = (best == best) & ~(highest <= best)
    return tl.where(larger, highest, best), tl.where(larger, (first + place).to(index.dtype), index)


@triton.jit
def best_along(best, index, axis: tl.constexpr):
    """Merges (largest logit, its class) along an axis; the first class that has the largest logit."""
    highest = largest(best, axis)
    NOWHERE: tl.constexpr = 2**31 - 1 if index.dtype == tl.int32 else 2**52
    return highest, tl.min(tl.where(same(best, tl.expand_dims(highest, axis)), index, NOWHERE), axis)


@triton.jit
def add_tile(state, x, probabilities, weight, parameters, space, m, n, first_class, config, EDGE: tl.constexpr):
    C: tl.constexpr = config.C
    top, total, mass, cross, count, every, moment = state
    edge = within(space, m, n)
    v = fetch(x, space, m, n, edge, EDGE, float("-inf")).to(C)  # (BM, BN)
    if x.kind != VECTOR and x.kind != STRIDED and (EDGE or x.kind < PEELED):
        v = tl.where(edge, v, float("-inf"))  # only loads of VECTOR and STRIDED give -inf there
    if config.ARGMAX:
        count, every = add_best(count, every, by_lane(v, config), first_class, config)
    v, _ = shaped(v, parameters, config.LOGITS)
    v = by_lane(v, config)  # (LM, LN, elements of a thread), as w and q
    larger = tl.maximum(top, tl.max(v, 2))  # ignores NaN: the exponentials show it
    away = v - tl.expand_dims(larger, 2)
    by, e = shrink(top, larger, C), exponential(less_top(v, tl.expand_dims(larger, 2)))
    if config.ENTROPY:
        cross = moved_moment(cross, total, top, larger, by) + tl.sum(tl.where(e == 0, 0.0, e * away), 2)
    total = total * by + tl.sum(e, 2)
    if weight is not None:
        w = fetch(weight, space, m, n, edge, EDGE).to(C)
        if weight.kind > PEELED:
            w = tl.where(edge, w, 0.0)
        w = by_lane(w, config)
    if probabilities is not None:
        q = tl.where(edge, fetch(probabilities, space, m, n, edge, EDGE).to(C), 0.0)
        q = by_lane(q, config)
        if weight is not None:
            q *= w
        cross += move(mass, top, larger) + tl.sum(tl.where(q == 0, 0.0, q * away), 2)
        mass += tl.sum(q, 2)
    if config.SMOOTH:
        exists = v != float("-inf")
        if weight is not None:
            moment += move(every, top, larger) + tl.sum(tl.where(exists, w * away, 0.0), 2)
            every += tl.sum(tl.where(exists, w, 0.0), 2)
        else:
            moment += move(count, top, larger) + tl.sum(tl.where(exists, away, 0.0), 2)
        count += tl.sum(exists.to(C), 2)
    return larger, total, mass, cross, count, every, moment


@triton.jit
def merge_along(state, axis: tl.constexpr, config):
    """Merges the states along one axis into one. Sums are trees of a fixed shape."""
    top, total, mass, cross, count, every, moment = state
    larger = tl.max(top, axis)
    highest = tl.expand_dims(larger, axis)
    by = shrink(top, highest, config.C)
    if config.ENTROPY:
        cross = moved_moment(cross, total, top, highest, by)
    elif config.HAS_Q:
        cross += move(mass, top, highest)
    if config.SMOOTH:
        moment += move(every if config.WEIGHT else count, top, highest)
    total, mass, cross = tl.sum(rounded_product(total, by), axis), tl.sum(mass, axis), tl.sum(cross, axis)
    if config.ARGMAX:
        count, every = best_along(count, every, axis)
    else:
        count, every = tl.sum(count, axis), tl.sum(every, axis)
    return larger, total, mass, cross, count, every, tl.sum(moment, axis)


@triton.jit
def merge(a, b, config):
    joined = (
        tl.join(a[0], b[0]), tl.join(a[1], b[1]), tl.join(a[2], b[2]), tl.join(a[3], b[3]), tl.join(a[4], b[4]),
        tl.join(a[5], b[5]), tl.join(a[6], b[6]),
    )  # fmt: skip
    return merge_along(joined, 1, config)


@triton.jit
def sum_tiles(first, last, block, x, probabilities, weight, parameters, space, config):
    """The state of each row in tiles [first, last), a piece of the row: (BM,), or (BN,) for rows across memory."""
    state = empty_state([config.LM, config.LN], config.C, config)
    for t in range(first, last):
        here, m, n, in_bounds = summed_tile(space, block, t, config)
        m0, n0 = corner(space, block, t, config)
        first_class = n0 if config.AXIS == INNER else m0
        if in_bounds:
            state = add_tile(state, x, probabilities, weight, parameters, here, m, n, first_class, config, False)
        else:
            state = add_tile(state, x, probabilities, weight, parameters, here, m, n, first_class, config, True)
    return merge_along(state, 1 if config.AXIS == INNER else 0, config)


@triton.jit
def widened(state):
    return tl.tuple([s.to(tl.float64) for s in state])


@triton.jit
def is_used(i: tl.constexpr, config):
    """True if the call needs sum i of the state."""
    used = i < 2 or (config.HAS_Q and i < 4) or (config.ENTROPY and i == 3) or (config.SMOOTH and i >= 4)
    return used or (config.ARGMAX and (i == BEST or i == BEST_CLASS))


@triton.jit
def store_state(pointer, size, state, config):
    """Stores a piece's sums among the partials, in arrays of `size`."""
    for i in tl.static_range(SUMS):
        if is_used(i, config):
            tl.store(pointer + size * i, state[i])


@triton.jit
def load_sum(i: tl.constexpr, partial, pieces, first, output, rows, BO: tl.constexpr, config):
    if is_used(i, config):
        value = load_partials(partial + pieces * rows * i, pieces, first, output, rows, config.BS, 0)[0]
    else:
        value = tl.zeros([config.BS, BO], tl.float64)
    return value


@triton.jit
def merge_partials(partial, pieces, output, rows, BO: tl.constexpr, config):
    """Merges the states of all pieces, in order of piece, whichever block finished last."""
    C: tl.constexpr = config.C
    state = empty_state([BO], tl.float64, config)
    for first in range(0, pieces, config.BS):
        top, inside = load_partials(partial, pieces, first, output, rows, config.BS, 0)
        top = tl.where(inside, top, lowest_top([1, 1], EXPONENTIALS, C).to(tl.float64))
        count = load_sum(4, partial, pieces, first, output, rows, BO, config)
        if config.ARGMAX:
            count = tl.where(inside, count, float("-inf"))
        part = (
            top,
            load_sum(1, partial, pieces, first, output, rows, BO, config),
            load_sum(2, partial, pieces, first, output, rows, BO, config),
            load_sum(3, partial, pieces, first, output, rows, BO, config),
            count,
            load_sum(5, partial, pieces, first, output, rows, BO, config),
            load_sum(6, partial, pieces, first, output, rows, BO, config),
        )
        state = merge(state, merge_along(part, 0, config), config)
    return state

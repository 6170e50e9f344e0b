"""The sums over the classes of a row that its cross entropy needs, in one read of its logits.

A state is (maximum, total, target_weight, target_sum, count, weight_sum, logit_sum):

    maximum         the largest logit
    total           sum exp(x - maximum); where maximum is inf, how many logits are inf
    target_weight   sum w q, for class probabilities q and class weights w
    target_sum      sum w q (x - maximum); for the row's entropy, sum exp(x - maximum) (x - maximum)
    count           how many classes exist: their logit is not -inf. Label smoothing needs it and the next two
    weight_sum      the sum of w over the classes that exist; without weights `count` serves
    logit_sum       sum w (x - maximum) over the classes that exist

With ARGMAX, `count` is the largest logit before softcap and temperature (NaN above all others), and `weight_sum` the
first class that has it.
Sums of x are relative to the maximum: large logits that differ by little would cancel. A lane has the state of the
elements that one thread holds, as in engine/accumulate.py, but with more sums than the states there.
"""

import triton
import triton.language as tl

from ..engine.blocks import load_partials
from ..engine.indexing import INNER, PEELED, STRIDED, VECTOR
from ..engine.math import exponential, rounded_product
from ..engine.row import summed_tile
from ..engine.state import EXPONENTIALS, largest, less_maximum, lowest_maximum, same
from ..engine.tile import by_lane, corner, fetch, within
from .logits import shaped

SUMS = tl.constexpr(7)
BEST, BEST_CLASS = tl.constexpr(4), tl.constexpr(5)  # with ARGMAX: `count` and `weight_sum`


@triton.jit
def empty_state(shape: tl.constexpr, DTYPE: tl.constexpr, config):
    """The state of no elements, in dtype DTYPE."""
    zero = tl.zeros(shape, DTYPE)
    count, weight_sum = zero, zero
    if config.ARGMAX:  # (a row of -inf alone has class 0)
        count, weight_sum = zero + float("-inf"), zero.to(tl.float64 if DTYPE == tl.float64 else config.I)
    return lowest_maximum(shape, EXPONENTIALS, config.C).to(DTYPE), zero, zero, zero, count, weight_sum, zero


@triton.jit
def shrink(maximum, larger, C: tl.constexpr):
    """exp(maximum - larger), in C; 1 where both are inf."""
    return tl.where(maximum == larger, 1.0, exponential((maximum - larger).to(C)).to(maximum.dtype))


@triton.jit
def move(weights, maximum, larger):
    """The change of sum w (x - maximum) when the maximum grows to `larger`. weights: sum w; 0 without elements."""
    return tl.where(weights == 0, 0.0, weights * (maximum - larger))


@triton.jit
def moved_sum(logit_sum, total, maximum, larger, by):
    """sum exp(x - maximum) (x - maximum), moved to a maximum that grows; by: exp(maximum - larger)."""
    return rounded_product(by, logit_sum + move(total, maximum, larger))


@triton.jit
def add_best(best, index, x, first, config):
    """Returns (largest logit, its class) per lane, after adding a tile x, split by lane: (LM, LN, elements of a
    thread). first: the first class of the tile."""
    LN: tl.constexpr = config.LN
    SIDE: tl.constexpr = config.VEC if LN * config.VEC <= config.BN else config.BN // LN
    highest = largest(x, 2)
    here = same(x, tl.expand_dims(highest, 2))
    class_index = tl.min(tl.where(here, tl.arange(0, x.shape[2])[None, None, :], x.shape[2]), 2)
    if config.AXIS == INNER:
        class_index = (class_index // SIDE * LN + tl.arange(0, LN)[None, :]) * SIDE + class_index % SIDE
    else:
        class_index = class_index * config.LM + tl.arange(0, config.LM)[:, None]
    larger = (best == best) & ~(highest <= best)
    return tl.where(larger, highest, best), tl.where(larger, (first + class_index).to(index.dtype), index)


@triton.jit
def best_along(best, index, axis: tl.constexpr):
    """Merges (largest logit, its class) along an axis; the first class that has the largest logit."""
    highest = largest(best, axis)
    NOWHERE: tl.constexpr = 2**31 - 1 if index.dtype == tl.int32 else 2**52
    return highest, tl.min(tl.where(same(best, tl.expand_dims(highest, axis)), index, NOWHERE), axis)


@triton.jit
def add_tile(state, x, probabilities, weight, parameters, space, m, n, first_class, config, EDGE: tl.constexpr):
    C: tl.constexpr = config.C
    maximum, total, target_weight, target_sum, count, weight_sum, logit_sum = state
    edge = within(space, m, n)
    v = fetch(x, space, m, n, edge, EDGE, float("-inf")).to(C)  # (BM, BN)
    if x.kind != VECTOR and x.kind != STRIDED and (EDGE or x.kind < PEELED):
        v = tl.where(edge, v, float("-inf"))  # only loads of VECTOR and STRIDED give -inf there
    if config.ARGMAX:
        count, weight_sum = add_best(count, weight_sum, by_lane(v, config), first_class, config)
    v, _ = shaped(v, parameters, config.LOGITS)
    v = by_lane(v, config)  # (LM, LN, elements of a thread), as w and q
    larger = tl.maximum(maximum, tl.max(v, 2))  # ignores NaN, which the exponentials pass on to total
    away = v - tl.expand_dims(larger, 2)
    by, e = shrink(maximum, larger, C), exponential(less_maximum(v, tl.expand_dims(larger, 2)))
    if config.ENTROPY:
        target_sum = moved_sum(target_sum, total, maximum, larger, by) + tl.sum(tl.where(e == 0, 0.0, e * away), 2)
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
        target_sum += move(target_weight, maximum, larger) + tl.sum(tl.where(q == 0, 0.0, q * away), 2)
        target_weight += tl.sum(q, 2)
    if config.SMOOTH:
        exists = v != float("-inf")
        if weight is not None:
            logit_sum += move(weight_sum, maximum, larger) + tl.sum(tl.where(exists, w * away, 0.0), 2)
            weight_sum += tl.sum(tl.where(exists, w, 0.0), 2)
        else:
            logit_sum += move(count, maximum, larger) + tl.sum(tl.where(exists, away, 0.0), 2)
        count += tl.sum(exists.to(C), 2)
    return larger, total, target_weight, target_sum, count, weight_sum, logit_sum


@triton.jit
def merge_along(state, axis: tl.constexpr, config):
    """Merges the states along one axis into one. Sums are trees of a fixed shape."""
    maximum, total, target_weight, target_sum, count, weight_sum, logit_sum = state
    larger = tl.max(maximum, axis)
    highest = tl.expand_dims(larger, axis)
    by = shrink(maximum, highest, config.C)
    if config.ENTROPY:
        target_sum = moved_sum(target_sum, total, maximum, highest, by)
    elif config.HAS_Q:
        target_sum += move(target_weight, maximum, highest)
    if config.SMOOTH:
        logit_sum += move(weight_sum if config.WEIGHT else count, maximum, highest)
    total, target_weight, target_sum = (
        tl.sum(rounded_product(total, by), axis),
        tl.sum(target_weight, axis),
        tl.sum(target_sum, axis),
    )
    if config.ARGMAX:
        count, weight_sum = best_along(count, weight_sum, axis)
    else:
        count, weight_sum = tl.sum(count, axis), tl.sum(weight_sum, axis)
    return larger, total, target_weight, target_sum, count, weight_sum, tl.sum(logit_sum, axis)


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
    """Stores a piece's sums among the partials: one array of `size` numbers for each sum that the call needs."""
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
        maximum, inside = load_partials(partial, pieces, first, output, rows, config.BS, 0)
        maximum = tl.where(inside, maximum, lowest_maximum([1, 1], EXPONENTIALS, C).to(tl.float64))
        count = load_sum(4, partial, pieces, first, output, rows, BO, config)
        if config.ARGMAX:
            count = tl.where(inside, count, float("-inf"))
        part = (
            maximum,
            load_sum(1, partial, pieces, first, output, rows, BO, config),
            load_sum(2, partial, pieces, first, output, rows, BO, config),
            load_sum(3, partial, pieces, first, output, rows, BO, config),
            count,
            load_sum(5, partial, pieces, first, output, rows, BO, config),
            load_sum(6, partial, pieces, first, output, rows, BO, config),
        )
        state = merge(state, merge_along(part, 0, config), config)
    return state

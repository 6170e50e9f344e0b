"""The forward of softmax and normalize, whose every result needs the whole of its row.

exp and log of fp32 are tl.exp and tl.log: those of base 2 that the GPU has, with 2 units in the last place, after
multiplying by log2(e), which adds |x - top| / 2 more; what is far below the top of its row is small by then.
"""

import triton
import triton.language as tl

from ..engine.accumulate import add_range
from ..engine.blocks import await_sums, count_summed, count_written, draw_ticket
from ..engine.indexing import INNER
from ..engine.scaling import product_beyond
from ..engine.state import EXPONENTIALS, SQUARES, merge_partials, store_state
from ..engine.tile import fetch, kept, store, within
from .row import at_batch, declare, divided, divisor, one_per_row, scaled_squares, shift_of, store_tile, tile_at

SOFTMAX, LOG_SOFTMAX, NORMALIZE = map(tl.constexpr, range(3))  # OP


@triton.jit
def softmax_tile(x, keep, top, total, OP: tl.constexpr):
    if OP == LOG_SOFTMAX:
        value = tl.where(keep, (x - top) - tl.log(total), float("-inf"))
    else:
        value = tl.where(keep, tl.exp(x - top) * (1 / total), 0.0)
    return value


@triton.jit
def write_rows(
    first_tile, last_tile, block, split, space, x, mask, out, first, second, state, eps,
    OP: tl.constexpr, X: tl.constexpr, MASK: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PEEL: tl.constexpr, AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    I: tl.constexpr,
):  # fmt: skip
    """The results of some tiles, from the state of their whole rows; with the first tile, the rows' numbers."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    count, top, total = tl.tuple([tl.expand_dims(s.to(tl.float64), ACROSS) for s in (state[0], state[4], state[5])])
    m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
    inside = one_per_row(space, m, n, AXIS) & (split == 0)
    if OP == NORMALIZE:
        norm = product_beyond(tl.sqrt(total), top)
        by = divisor(norm, eps, C)
        store(first, space, m, n, norm, inside, FIRST, True)
    else:
        # as exp(inf - inf) and exp(-inf - -inf) have it
        odd = (top == float("inf")) | (total == float("inf")) | ((total == 0) & (count > 0))
        total = tl.where(odd, float("nan"), total)
        store(first, space, m, n, top, inside, FIRST, True)
        store(second, space, m, n, total, inside, SECOND, True)
        top, total = top.to(C), total.to(C)
    for t in range(first_tile, last_tile):
        m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
        # (beside a row nothing is stored: it needs no bounds here)
        keep = kept(space, mask, mask, m, n, MASK, 0, BM, BN, MASK or not PEEL)[0]
        v = fetch(x, space, m, n, keep, X, True).to(C)
        if OP == NORMALIZE:
            value = divided(v, by, C)
        else:
            value = softmax_tile(v, keep, top, total, OP)
        store_tile(out, space, block, t, m, n, value, OUT, AXIS, BM, BN)


@triton.jit
def rows_kernel(
    x, mask, out, first, second, partial, counter,
    eps,
    outer_shape, inner_shape, x_outer, x_inner, mask_outer, mask_inner, out_outer, out_inner,
    first_outer, first_inner, second_outer, second_inner,
    batch_shape, x_batch, mask_batch, out_batch, first_batch, second_batch,
    M, N, tiles, across, groups, splits, per_split,
    OP: tl.constexpr, X: tl.constexpr, MASK: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PEEL: tl.constexpr, AXIS: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr, LONG: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr, VEC: tl.constexpr,
    C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """out, and of each row its top and total (softmax), or its norm, in fp64."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    if SPLIT:
        group, split, summing = draw_ticket(counter, splits, groups)
        group, split = group.to(I), split.to(I)
    else:
        group = tl.program_id(0).to(I)
    batch, block = group // across, group % across
    space = (M, N, outer_shape, inner_shape)
    xs = at_batch(x, x_outer, x_inner, x_batch, batch, batch_shape)
    masks = at_batch(mask, mask_outer, mask_inner, mask_batch, batch, batch_shape)
    outs = at_batch(out, out_outer, out_inner, out_batch, batch, batch_shape)
    firsts = at_batch(first, first_outer, first_inner, first_batch, batch, batch_shape)
    seconds = at_batch(second, second_outer, second_inner, second_batch, batch, batch_shape)
    if PEEL:
        space = (M, N, outer_shape, inner_shape, shift_of(xs, block, outer_shape, VEC, I))
    if WHOLE:
        m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
        inside = one_per_row(space, m, n, AXIS)
        keep = kept(space, masks, masks, m, n, MASK, 0, BM, BN, True)[0]
        v = fetch(xs, space, m, n, keep, X, True).to(C)
        if OP == NORMALIZE:
            unit, scaled, squares = scaled_squares(tl.where(keep, v, 0.0), ACROSS)
            norm = product_beyond(tl.sqrt(squares.to(tl.float64)), unit.to(tl.float64))
            value = divided(v, divisor(norm, eps, C), C)
            store(firsts, space, m, n, norm, inside, FIRST, True)
        else:
            top = tl.max(tl.where(keep, v, float("-inf")), ACROSS, keep_dims=True)
            total = tl.sum(tl.where(keep, tl.exp(v - top), 0.0), ACROSS, keep_dims=True)
            value = softmax_tile(v, keep, top, total, OP)
            store(firsts, space, m, n, top.to(tl.float64), inside, FIRST, True)
            store(seconds, space, m, n, total.to(tl.float64), inside, SECOND, True)
        edge = within(space, m, n)
        store(outs, space, m, n, value, edge, OUT, True)
    else:
        MODE: tl.constexpr = SQUARES if OP == NORMALIZE else EXPONENTIALS
        if SPLIT:
            BO: tl.constexpr = BM if AXIS == INNER else BN
            first_tile = split * per_split
            last_tile = tl.minimum(first_tile + per_split, tiles)
            rows = groups.to(I) * BO
            output = group * BO + tl.arange(0, BO).to(I)
            many = splits > BS
            if summing:
                state = add_range(
                    first_tile, last_tile, block, space, xs, masks, masks,
                    MODE, False, False, X, MASK, 0, AXIS, BM, BN, LM, LN, VEC, C, I, LONG,
                )  # fmt: skip
                where = partial + split * rows + output
                store_state(where, splits * rows, output < rows, state, MODE, False)
                if (count_summed(counter, group) == splits - 1) & many:
                    state = merge_partials(partial, splits, output, rows, splits, MODE, 0, BS, BO, C)
                    tl.debug_barrier()  # every thread has loaded what it overwrites
                    store_state(partial + output, splits * rows, output < rows, state, MODE, False)
                    count_summed(counter, group)
            else:
                await_sums(counter, group, splits + many.to(tl.int32))
                parts = tl.where(many, 1, splits)
                state = merge_partials(partial, splits, output, rows, parts, MODE, 0, BS, BO, C)
                write_rows(
                    first_tile, last_tile, block, split, space, xs, masks, outs, firsts, seconds, state, eps,
                    OP, X, MASK, OUT, FIRST, SECOND, PEEL, AXIS, BM, BN, VEC, C, I,
                )  # fmt: skip
                count_written(counter, group, splits)
        else:
            state = add_range(
                tiles * 0, tiles, block, space, xs, masks, masks,
                MODE, False, False, X, MASK, 0, AXIS, BM, BN, LM, LN, VEC, C, I, LONG,
            )  # fmt: skip
            write_rows(
                tiles * 0, tiles, block, tiles * 0, space, xs, masks, outs, firsts, seconds, state, eps,
                OP, X, MASK, OUT, FIRST, SECOND, PEEL, AXIS, BM, BN, VEC, C, I,
            )  # fmt: skip


OPERANDS = ("x", "mask", "out", "first", "second")
ROWS = declare(rows_kernel, OPERANDS, "OP")

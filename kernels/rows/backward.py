"""The backward of softmax and normalize: a dot product along each row, and an elementwise function of it."""

import triton
import triton.language as tl

from ..engine.blocks import add_partials, await_sums, count_summed, count_written, draw_ticket
from ..engine.indexing import INNER
from ..engine.tile import fetch, kept, store, within
from ..engine.tiling import FLUSH
from .forward import LOG_SOFTMAX, NORMALIZE, SOFTMAX
from .row import at_batch, at_most, declare, divided, divisor, shift_of, store_tile, tile_at, tile_is_whole


@triton.jit
def dot_term(x, g, keep, first, second, by, OP: tl.constexpr, C: tl.constexpr):
    """(y, what a row's dot product sums): y = exp(x - top) / total, or x / norm."""
    if OP == NORMALIZE:
        y = divided(x, by, C)
        term = tl.where(keep, g * y, 0.0)
    else:
        y = tl.exp(x - first) * (1 / second)
        if OP == LOG_SOFTMAX:
            term = tl.where(keep, g, 0.0)
        else:
            term = tl.where(keep, g * y, 0.0)
    return y, term


@triton.jit
def gradient_tile(y, g, keep, dot, by, OP: tl.constexpr, C: tl.constexpr):
    """softmax: y (g - dot); its logarithm: g - y dot; x / norm: (g - y dot) / norm."""
    if OP == SOFTMAX:
        value = y * (g - dot)
    else:
        value = g - y * dot
    if OP == NORMALIZE:
        value = divided(value, by, C)
    return tl.where(keep, value, 0.0)


@triton.jit
def tile_terms(
    space, x, grad, mask, m, n, a, b, by,
    OP: tl.constexpr, X: tl.constexpr, GRAD: tl.constexpr, MASK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """(y, the dot product's terms, the upstream gradient, what is kept) of a tile."""
    keep = kept(space, mask, mask, m, n, MASK, 0, BM, BN, EDGE)[0]
    v = fetch(x, space, m, n, keep, X, EDGE).to(C)
    g = fetch(grad, space, m, n, keep, GRAD, EDGE).to(C)
    y, term = dot_term(v, g, keep, a, b, by, OP, C)
    return y, term, g, keep


@triton.jit
def dot_range(
    first_tile, last_tile, block, space, x, grad, mask, a, b, by,
    OP: tl.constexpr, X: tl.constexpr, GRAD: tl.constexpr, MASK: tl.constexpr, PEEL: tl.constexpr,
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """The part of each row's dot product that lies in some tiles."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    sums = tl.zeros([BM if AXIS == INNER else BN], tl.float64)
    for start in range(first_tile, last_tile, FLUSH):
        lanes = tl.zeros([BM, BN], C)
        for t in range(start, tl.minimum(start + FLUSH, last_tile)):
            m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
            whole = False
            if PEEL:
                whole = tile_is_whole(space, block, t, AXIS, BM, BN)
            if whole:
                lanes += tile_terms(space, x, grad, mask, m, n, a, b, by, OP, X, GRAD, MASK, BM, BN, C, False)[1]
            else:
                lanes += tile_terms(space, x, grad, mask, m, n, a, b, by, OP, X, GRAD, MASK, BM, BN, C, True)[1]
        sums += tl.sum(lanes, ACROSS).to(tl.float64)
    return sums


@triton.jit
def write_gradient(
    first_tile, last_tile, block, space, x, grad, mask, out, a, b, by, dot,
    OP: tl.constexpr, X: tl.constexpr, GRAD: tl.constexpr, MASK: tl.constexpr, OUT: tl.constexpr, PEEL: tl.constexpr,
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    for t in range(first_tile, last_tile):
        m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
        # (beside a row nothing is stored: it needs no bounds here)
        keep = kept(space, mask, mask, m, n, MASK, 0, BM, BN, MASK or not PEEL)[0]
        v = fetch(x, space, m, n, keep, X, True).to(C)
        g = fetch(grad, space, m, n, keep, GRAD, True).to(C)
        y, term = dot_term(v, g, keep, a, b, by, OP, C)
        store_tile(out, space, block, t, m, n, gradient_tile(y, g, keep, dot, by, OP, C), OUT, AXIS, BM, BN)


@triton.jit
def rows_backward_kernel(
    x, grad, mask, out, first, second, partial, counter,
    eps,
    outer_shape, inner_shape, x_outer, x_inner, grad_outer, grad_inner, mask_outer, mask_inner, out_outer, out_inner,
    first_outer, first_inner, second_outer, second_inner,
    batch_shape, x_batch, grad_batch, mask_batch, out_batch, first_batch, second_batch,
    M, N, tiles, across, groups, splits, per_split,
    OP: tl.constexpr, X: tl.constexpr, GRAD: tl.constexpr, MASK: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, PEEL: tl.constexpr, AXIS: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr,
    LONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    if SPLIT:
        group, split, summing = draw_ticket(counter, splits, groups)
        group, split = group.to(I), split.to(I)
    else:
        group = tl.program_id(0).to(I)
    batch, block = group // across, group % across
    space = (M, N, outer_shape, inner_shape)
    xs = at_batch(x, x_outer, x_inner, x_batch, batch, batch_shape)
    gs = at_batch(grad, grad_outer, grad_inner, grad_batch, batch, batch_shape)
    masks = at_batch(mask, mask_outer, mask_inner, mask_batch, batch, batch_shape)
    outs = at_batch(out, out_outer, out_inner, out_batch, batch, batch_shape)
    firsts = at_batch(first, first_outer, first_inner, first_batch, batch, batch_shape)
    seconds = at_batch(second, second_outer, second_inner, second_batch, batch, batch_shape)
    if PEEL:
        space = (M, N, outer_shape, inner_shape, shift_of(xs, block, outer_shape, VEC, I))
    m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
    nowhere = tl.zeros([1, 1], tl.int1)
    a = fetch(firsts, space, m, n, nowhere, FIRST, True)
    if OP == NORMALIZE:
        by = divisor(a, eps, C)
        b = a
        counts = ~at_most(a, eps)  # otherwise the divisor is eps, a constant
    else:
        b = fetch(seconds, space, m, n, nowhere, SECOND, True).to(C)
        a = a.to(C)
        by = a
        counts = True
    if WHOLE:
        y, term, g, keep = tile_terms(space, xs, gs, masks, m, n, a, b, by, OP, X, GRAD, MASK, BM, BN, C, True)
        dot = tl.sum(term, ACROSS, keep_dims=True)
        if OP == NORMALIZE:
            dot = tl.where(counts, dot, 0.0)
        edge = within(space, m, n)
        store(outs, space, m, n, gradient_tile(y, g, keep, dot, by, OP, C), edge, OUT, True)
    elif SPLIT:
        BO: tl.constexpr = BM if AXIS == INNER else BN
        first_tile = split * per_split
        last_tile = tl.minimum(first_tile + per_split, tiles)
        rows = groups.to(I) * BO
        output = group * BO + tl.arange(0, BO).to(I)
        many = splits > BS
        if summing:
            sums = dot_range(
                first_tile, last_tile, block, space, xs, gs, masks, a, b, by,
                OP, X, GRAD, MASK, PEEL, AXIS, BM, BN, VEC, C, I,
            )  # fmt: skip
            tl.store(partial + split * rows + output, sums)
            if (count_summed(counter, group) == splits - 1) & many:
                sums = add_partials(partial, splits, output, rows, BS, BO)[0]
                tl.debug_barrier()  # every thread has loaded what it overwrites
                tl.store(partial + output, sums)
                count_summed(counter, group)
        else:
            await_sums(counter, group, splits + many.to(tl.int32))
            parts = tl.where(many, 1, splits)
            dot = tl.expand_dims(add_partials(partial, parts, output, rows, BS, BO)[0], ACROSS).to(C)
            if OP == NORMALIZE:
                dot = tl.where(counts, dot, 0.0)
            write_gradient(
                first_tile, last_tile, block, space, xs, gs, masks, outs, a, b, by, dot,
                OP, X, GRAD, MASK, OUT, PEEL, AXIS, BM, BN, VEC, C, I,
            )  # fmt: skip
            count_written(counter, group, splits)
    else:
        sums = dot_range(
            tiles * 0, tiles, block, space, xs, gs, masks, a, b, by, OP, X, GRAD, MASK, PEEL, AXIS, BM, BN, VEC, C, I
        )  # fmt: skip
        dot = tl.expand_dims(sums, ACROSS).to(C)
        if OP == NORMALIZE:
            dot = tl.where(counts, dot, 0.0)
        write_gradient(
            tiles * 0, tiles, block, space, xs, gs, masks, outs, a, b, by, dot,
            OP, X, GRAD, MASK, OUT, PEEL, AXIS, BM, BN, VEC, C, I,
        )  # fmt: skip


OPERANDS = ("x", "grad", "mask", "out", "first", "second")
ROWS_BACKWARD = declare(rows_backward_kernel, OPERANDS, "OP")

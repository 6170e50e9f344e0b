"""The row skeleton: softmax and normalisation, whose every result needs the whole of its row, and back.

Tiles are (BM, BN) over an outer and an inner group of dimensions, of which one is the row: any dimension, through any
strides. Where it is the outer one, the inner holds the neighbours in memory of a row's elements, and what is left is
the batch, of which each block has one. A row that fits stays on the chip between its sum and its results (WHOLE): one
read, one write. A longer one is read twice, tile by tile; where there are few of them, by several blocks (SPLIT).

exp and log of fp32 are tl.exp and tl.log: those of base 2 that the GPU has, with 2 units in the last place, after
multiplying by log2(e), which adds |x - top| / 2 more; what is far below the top of its row is small by then.
"""

import triton
import triton.language as tl

from ..engine.elementwise import store
from ..engine.folding import EXPONENTIAL, SQUARES, fold_range, gather, leave
from ..engine.indexing import fetch, spread
from ..engine.launch import Config, Kernel
from ..engine.reduction import FLUSH, INNER
from ..engine.reduction import gather as gather_sums
from ..engine.scaling import BEYOND, apart, power_below, product_beyond, reciprocal
from ..engine.tickets import await_folds, draw, folded, written

SOFTMAX, LOG_SOFTMAX, NORMALIZE = map(tl.constexpr, range(3))  # OP

# An operand is the tuple (pointer, outer strides, inner strides); `space` is (M, N, outer shape, inner shape).


@triton.jit
def tile_at(
    space, block, t, AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, I: tl.constexpr
):
    """(m, n) of tile t of the rows of a block."""
    if AXIS == INNER:
        m0, n0 = block * BM, t * BN
    else:
        m0, n0 = t * BM, block * BN
    return m0 + tl.arange(0, BM).to(I), tl.max_contiguous(n0 + tl.arange(0, BN).to(I), VEC)


@triton.jit
def kept_in(space, mask, m, n, MASK: tl.constexpr):
    keep = (m < space[0])[:, None] & (n < space[1])[None, :]
    if MASK:
        keep = keep & fetch(mask, space, m, n, keep, MASK, True)
    return keep


@triton.jit
def one_a_row(space, m, n, AXIS: tl.constexpr):
    """Where a number of each row is stored."""
    if AXIS == INNER:
        inside = (m < space[0])[:, None]
    else:
        inside = (n < space[1])[None, :]
    return inside


@triton.jit
def times(x, c, C: tl.constexpr):
    """x c, for c in fp64, one number a row."""
    if C == tl.float64:
        value = x * c
    else:
        c, power = apart(c)
        value = x * c * power
    return value


@triton.jit
def at_most(norm, eps):
    """Whether eps is the divisor. A norm that is marked by a minus is beyond fp64."""
    return (norm >= 0) & (norm <= eps)


@triton.jit
def inverse(norm, eps):
    """1 / max(norm, eps), 0 for a vector of zeros."""
    floor = tl.where(at_most(norm, eps), eps, tl.abs(norm))  # NaN stays
    by = 1 / tl.where(floor == 0, 1.0, floor)
    return tl.where(norm == 0, 0.0, tl.where(norm < 0, by / BEYOND, by))


@triton.jit
def softmax_tile(x, keep, top, total, OP: tl.constexpr):
    if OP == LOG_SOFTMAX:
        value = tl.where(keep, (x - top) - tl.log(total), float("-inf"))
    else:
        value = tl.where(keep, tl.exp(x - top) * (1 / total), 0.0)
    return value


@triton.jit
def scaled_squares(x, ACROSS: tl.constexpr):
    """(unit, sum of (x / unit)^2) of each row, neither of which overflows."""
    unit = power_below(tl.max(tl.abs(x), ACROSS, keep_dims=True))
    x = x * reciprocal(unit)
    return unit, x, tl.sum(x * x, ACROSS, keep_dims=True)


@triton.jit
def write_rows(
    first_tile, last_tile, block, split, space, x, mask, out, first, second, count, top, total, eps,
    OP: tl.constexpr, X: tl.constexpr, MASK: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """The results of some tiles of rows that were folded to (count, top, total); with the first, the rows' numbers."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    count = tl.expand_dims(count, ACROSS)
    top = tl.expand_dims(top, ACROSS)
    total = tl.expand_dims(total, ACROSS)
    m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
    inside = one_a_row(space, m, n, AXIS) & (split == 0)
    if OP == NORMALIZE:
        norm = product_beyond(tl.sqrt(total), top)
        by = inverse(norm, eps)
        store(first, space, m, n, norm, inside, FIRST, True)
    else:
        # as exp(inf - inf) and exp(-inf - -inf) have it
        total = tl.where((total == float("inf")) | ((total == 0) & (count > 0)), float("nan"), total)
        store(first, space, m, n, top, inside, FIRST, True)
        store(second, space, m, n, total, inside, SECOND, True)
        top, total = top.to(C), total.to(C)
    for t in range(first_tile, last_tile):
        m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
        keep = kept_in(space, mask, m, n, MASK)
        v = fetch(x, space, m, n, keep, X, True).to(C)
        if OP == NORMALIZE:
            value = times(v, by, C)
        else:
            value = softmax_tile(v, keep, top, total, OP)
        edge = (m < space[0])[:, None] & (n < space[1])[None, :]
        store(out, space, m, n, value, edge, OUT, True)


@triton.jit
def rows_kernel(
    x, mask, out, first, second, partial, counter,
    eps,
    outer_shape, inner_shape, x_outer, x_inner, mask_outer, mask_inner, out_outer, out_inner,
    first_outer, first_inner, second_outer, second_inner,
    batch_shape, x_batch, mask_batch, out_batch, first_batch, second_batch,
    M, N, tiles, across, groups, splits, per_split,
    OP: tl.constexpr, X: tl.constexpr, MASK: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    AXIS: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr, LONG: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    I: tl.constexpr,
):  # fmt: skip
    """out, and of each row its top and total (softmax), or its norm, in fp64."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    if SPLIT:
        group, split, folding = draw(counter, splits, groups)
        group, split = group.to(I), split.to(I)
    else:
        group = tl.program_id(0).to(I)
    batch, block = group // across, group % across
    x = x + spread(batch, batch_shape, x_batch)
    if MASK:
        mask = mask + spread(batch, batch_shape, mask_batch)
    out = out + spread(batch, batch_shape, out_batch)
    first = first + spread(batch, batch_shape, first_batch)
    if SECOND:
        second = second + spread(batch, batch_shape, second_batch)
    space = (M, N, outer_shape, inner_shape)
    xs, masks, outs = (x, x_outer, x_inner), (mask, mask_outer, mask_inner), (out, out_outer, out_inner)
    firsts, seconds = (first, first_outer, first_inner), (second, second_outer, second_inner)
    if WHOLE:
        m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
        inside = one_a_row(space, m, n, AXIS)
        keep = kept_in(space, masks, m, n, MASK)
        v = fetch(xs, space, m, n, keep, X, True).to(C)
        if OP == NORMALIZE:
            unit, scaled, squares = scaled_squares(tl.where(keep, v, 0.0), ACROSS)
            norm = product_beyond(tl.sqrt(squares.to(tl.float64)), unit.to(tl.float64))
            value = times(v, inverse(norm, eps), C)
            store(firsts, space, m, n, norm, inside, FIRST, True)
        else:
            top = tl.max(tl.where(keep, v, float("-inf")), ACROSS, keep_dims=True)
            total = tl.sum(tl.where(keep, tl.exp(v - top), 0.0), ACROSS, keep_dims=True)
            value = softmax_tile(v, keep, top, total, OP)
            store(firsts, space, m, n, top.to(tl.float64), inside, FIRST, True)
            store(seconds, space, m, n, total.to(tl.float64), inside, SECOND, True)
        edge = (m < M)[:, None] & (n < N)[None, :]
        store(outs, space, m, n, value, edge, OUT, True)
    else:
        MODE: tl.constexpr = SQUARES if OP == NORMALIZE else EXPONENTIAL
        if SPLIT:
            BO: tl.constexpr = BM if AXIS == INNER else BN
            first_tile = split * per_split
            last_tile = tl.minimum(first_tile + per_split, tiles)
            rows = groups.to(I) * BO
            kept = group * BO + tl.arange(0, BO).to(I)
            if folding:
                count, weights, pivot, shift, top, total = fold_range(
                    first_tile, last_tile, block, space, xs, masks, masks,
                    MODE, False, False, X, MASK, 0, AXIS, BM, BN, FOLD, GROUP, VEC, C, I, LONG,
                )  # fmt: skip
                where = partial + split * rows + kept
                leave(where, splits * rows, kept < rows, count, weights, pivot, shift, top, total, MODE, False)
                folded(counter, group)
            else:
                await_folds(counter, group, splits)
                count, weights, pivot, shift, top, total = gather(partial, splits, kept, rows, MODE, 0, BS, BO, C)
                write_rows(
                    first_tile, last_tile, block, split, space, xs, masks, outs, firsts, seconds, count, top, total,
                    eps, OP, X, MASK, OUT, FIRST, SECOND, AXIS, BM, BN, VEC, C, I,
                )  # fmt: skip
                written(counter, group, splits)
        else:
            count, weights, pivot, shift, top, total = fold_range(
                tiles * 0, tiles, block, space, xs, masks, masks,
                MODE, False, False, X, MASK, 0, AXIS, BM, BN, FOLD, GROUP, VEC, C, I, LONG,
            )  # fmt: skip
            write_rows(
                tiles * 0, tiles, block, tiles * 0, space, xs, masks, outs, firsts, seconds, count, top, total,
                eps, OP, X, MASK, OUT, FIRST, SECOND, AXIS, BM, BN, VEC, C, I,
            )  # fmt: skip


@triton.jit
def dot_term(x, g, keep, first, second, by, OP: tl.constexpr, C: tl.constexpr):
    """(y, what a row's dot product sums): y = exp(x - top) / total, or x / norm."""
    if OP == NORMALIZE:
        y = times(x, by, C)
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
        value = times(value, by, C)
    return tl.where(keep, value, 0.0)


@triton.jit
def dot_range(
    first_tile, last_tile, block, space, x, grad, mask, a, b, by,
    OP: tl.constexpr, X: tl.constexpr, GRAD: tl.constexpr, MASK: tl.constexpr, AXIS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """The part of each row's dot product that lies in some tiles."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    sums = tl.zeros([BM if AXIS == INNER else BN], tl.float64)
    for start in range(first_tile, last_tile, FLUSH):
        lanes = tl.zeros([BM, BN], C)
        for t in range(start, tl.minimum(start + FLUSH, last_tile)):
            m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
            keep = kept_in(space, mask, m, n, MASK)
            v = fetch(x, space, m, n, keep, X, True).to(C)
            g = fetch(grad, space, m, n, keep, GRAD, True).to(C)
            y, term = dot_term(v, g, keep, a, b, by, OP, C)
            lanes += term
        sums += tl.sum(lanes, ACROSS).to(tl.float64)
    return sums


@triton.jit
def write_gradient(
    first_tile, last_tile, block, space, x, grad, mask, out, a, b, by, dot,
    OP: tl.constexpr, X: tl.constexpr, GRAD: tl.constexpr, MASK: tl.constexpr, OUT: tl.constexpr, AXIS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    for t in range(first_tile, last_tile):
        m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
        keep = kept_in(space, mask, m, n, MASK)
        v = fetch(x, space, m, n, keep, X, True).to(C)
        g = fetch(grad, space, m, n, keep, GRAD, True).to(C)
        y, term = dot_term(v, g, keep, a, b, by, OP, C)
        edge = (m < space[0])[:, None] & (n < space[1])[None, :]
        store(out, space, m, n, gradient_tile(y, g, keep, dot, by, OP, C), edge, OUT, True)


@triton.jit
def rows_backward_kernel(
    x, grad, mask, out, first, second, partial, counter,
    eps,
    outer_shape, inner_shape, x_outer, x_inner, grad_outer, grad_inner, mask_outer, mask_inner, out_outer, out_inner,
    first_outer, first_inner, second_outer, second_inner,
    batch_shape, x_batch, grad_batch, mask_batch, out_batch, first_batch, second_batch,
    M, N, tiles, across, groups, splits, per_split,
    OP: tl.constexpr, X: tl.constexpr, GRAD: tl.constexpr, MASK: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, AXIS: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr, LONG: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr,
    C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    if SPLIT:
        group, split, folding = draw(counter, splits, groups)
        group, split = group.to(I), split.to(I)
    else:
        group = tl.program_id(0).to(I)
    batch, block = group // across, group % across
    x = x + spread(batch, batch_shape, x_batch)
    grad = grad + spread(batch, batch_shape, grad_batch)
    if MASK:
        mask = mask + spread(batch, batch_shape, mask_batch)
    out = out + spread(batch, batch_shape, out_batch)
    first = first + spread(batch, batch_shape, first_batch)
    if SECOND:
        second = second + spread(batch, batch_shape, second_batch)
    space = (M, N, outer_shape, inner_shape)
    xs, gs = (x, x_outer, x_inner), (grad, grad_outer, grad_inner)
    masks, outs = (mask, mask_outer, mask_inner), (out, out_outer, out_inner)
    m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
    nowhere = tl.zeros([1, 1], tl.int1)
    a = fetch((first, first_outer, first_inner), space, m, n, nowhere, FIRST, True)
    if OP == NORMALIZE:
        by = inverse(a, eps)
        b = a
        counts = ~at_most(a, eps)  # otherwise the divisor is eps, a constant
    else:
        b = fetch((second, second_outer, second_inner), space, m, n, nowhere, SECOND, True).to(C)
        a = a.to(C)
        by = a
        counts = True
    if WHOLE:
        keep = kept_in(space, masks, m, n, MASK)
        v = fetch(xs, space, m, n, keep, X, True).to(C)
        g = fetch(gs, space, m, n, keep, GRAD, True).to(C)
        y, term = dot_term(v, g, keep, a, b, by, OP, C)
        dot = tl.sum(term, ACROSS, keep_dims=True)
        if OP == NORMALIZE:
            dot = tl.where(counts, dot, 0.0)
        edge = (m < M)[:, None] & (n < N)[None, :]
        store(outs, space, m, n, gradient_tile(y, g, keep, dot, by, OP, C), edge, OUT, True)
    elif SPLIT:
        BO: tl.constexpr = BM if AXIS == INNER else BN
        first_tile = split * per_split
        last_tile = tl.minimum(first_tile + per_split, tiles)
        rows = groups.to(I) * BO
        kept = group * BO + tl.arange(0, BO).to(I)
        if folding:
            sums = dot_range(
                first_tile, last_tile, block, space, xs, gs, masks, a, b, by,
                OP, X, GRAD, MASK, AXIS, BM, BN, VEC, C, I,
            )  # fmt: skip
            tl.store(partial + split * rows + kept, sums)
            folded(counter, group)
        else:
            await_folds(counter, group, splits)
            dot = tl.expand_dims(gather_sums(partial, splits, kept, rows, BS, BO), ACROSS).to(C)
            if OP == NORMALIZE:
                dot = tl.where(counts, dot, 0.0)
            write_gradient(
                first_tile, last_tile, block, space, xs, gs, masks, outs, a, b, by, dot,
                OP, X, GRAD, MASK, OUT, AXIS, BM, BN, VEC, C, I,
            )  # fmt: skip
            written(counter, group, splits)
    else:
        sums = dot_range(
            tiles * 0, tiles, block, space, xs, gs, masks, a, b, by, OP, X, GRAD, MASK, AXIS, BM, BN, VEC, C, I
        )  # fmt: skip
        dot = tl.expand_dims(sums, ACROSS).to(C)
        if OP == NORMALIZE:
            dot = tl.where(counts, dot, 0.0)
        write_gradient(
            tiles * 0, tiles, block, space, xs, gs, masks, outs, a, b, by, dot,
            OP, X, GRAD, MASK, OUT, AXIS, BM, BN, VEC, C, I,
        )  # fmt: skip


FORWARD = ("x", "mask", "out", "first", "second")
BACKWARD = ("x", "grad", "mask", "out", "first", "second")


def declare(fn, operands, *first, split=True):
    """A kernel of rows; split: one that may spread a row over several blocks."""
    tiling = ("WHOLE", "SPLIT", "LONG", "BM", "BN", "BS") if split else ("BM", "BN")
    return Kernel(
        fn,
        pointers=(*operands, "partial", "counter") if split else operands,
        floats=("eps",),
        operands=operands,
        tuples=("batch_shape", *(f"{name}_batch" for name in operands)),
        indices=("M", "N", "tiles", "across", *(("groups", "splits", "per_split") if split else ())),
        constants=(*first, *(name.upper() for name in operands), "AXIS", *tiling,
                   *(("FOLD", "GROUP") if split else ()), "VEC", "C", "I"),
        # left alone, the assembler spills two registers of the general variant to fit one block more
        configs={None: Config(max_registers=(None, 128))},
    )  # fmt: skip


ROWS = declare(rows_kernel, FORWARD, "OP")
ROWS_BACKWARD = declare(rows_backward_kernel, BACKWARD, "OP")

"""The row skeleton: softmax and normalisation, whose every result needs the whole of its row, and back.

Tiles are (BM, BN) over an outer and an inner group of dimensions, of which one is the row: any dimension, through any
strides. Where it is the outer one, the inner holds the neighbours in memory of a row's elements, and what is left is
the batch, of which each block has one. A row that fits stays on the chip between its sum and its results (WHOLE): one
read, one write. A longer one is read twice, tile by tile.

exp and log of fp32 are tl.exp and tl.log: those of base 2 that the GPU has, with 2 units in the last place, after
multiplying by log2(e), which adds |x - top| / 2 more; what is far below the top of its row is small by then.
"""

import triton
import triton.language as tl

from .elementwise import store
from .folding import EXPONENTIAL, SQUARES, fold_range
from .indexing import fetch, spread
from .launch import Config, Kernel
from .reduction import FLUSH, INNER
from .scaling import apart, power_below, reciprocal

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
def times(x, c, C: tl.constexpr):
    """x c, for c in fp64, one number a row."""
    if C == tl.float64:
        value = x * c
    else:
        c, power = apart(c)
        value = x * c * power
    return value


@triton.jit
def inverse(norm, eps):
    """1 / max(norm, eps), 0 for a vector of zeros."""
    floor = tl.where(norm < eps, eps, norm)  # NaN stays
    return tl.where(norm == 0, 0.0, 1 / tl.where(floor == 0, 1.0, floor))


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
def rows_kernel(
    x, mask, out, first, second,
    eps,
    outer_shape, inner_shape, x_outer, x_inner, mask_outer, mask_inner, out_outer, out_inner,
    first_outer, first_inner, second_outer, second_inner,
    batch_shape, x_batch, mask_batch, out_batch, first_batch, second_batch,
    M, N, tiles, across,
    OP: tl.constexpr, X: tl.constexpr, MASK: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    AXIS: tl.constexpr, WHOLE: tl.constexpr, LONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FOLD: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """out, and of each row its top and total (softmax), or its norm, in fp64."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    block = tl.program_id(0).to(I)
    batch, block = block // across, block % across
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
    m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
    if AXIS == INNER:
        inside = (m < M)[:, None]
    else:
        inside = (n < N)[None, :]
    if WHOLE:
        keep = kept_in(space, masks, m, n, MASK)
        v = fetch(xs, space, m, n, keep, X, True).to(C)
        if OP == NORMALIZE:
            unit, scaled, squares = scaled_squares(tl.where(keep, v, 0.0), ACROSS)
            norm = tl.sqrt(squares.to(tl.float64)) * unit.to(tl.float64)
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
        count, weights, pivot, shift, top, total = fold_range(
            tiles * 0, tiles, block, space, xs, masks, masks,
            MODE, False, False, X, MASK, 0, AXIS, BM, BN, FOLD, GROUP, VEC, C, I, LONG,
        )  # fmt: skip
        count, top, total = (
            tl.expand_dims(count, ACROSS),
            tl.expand_dims(top, ACROSS),
            tl.expand_dims(total, ACROSS),
        )
        if OP == NORMALIZE:
            norm = tl.sqrt(total) * top
            by = inverse(norm, eps)
            store(firsts, space, m, n, norm, inside, FIRST, True)
        else:
            # as exp(inf - inf) and exp(-inf - -inf) have it
            total = tl.where((total == float("inf")) | ((total == 0) & (count > 0)), float("nan"), total)
            store(firsts, space, m, n, top, inside, FIRST, True)
            store(seconds, space, m, n, total, inside, SECOND, True)
            top, total = top.to(C), total.to(C)
        for t in range(0, tiles):
            m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
            keep = kept_in(space, masks, m, n, MASK)
            v = fetch(xs, space, m, n, keep, X, True).to(C)
            if OP == NORMALIZE:
                value = times(v, by, C)
            else:
                value = softmax_tile(v, keep, top, total, OP)
            edge = (m < M)[:, None] & (n < N)[None, :]
            store(outs, space, m, n, value, edge, OUT, True)


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
def rows_backward_kernel(
    x, grad, mask, out, first, second,
    eps,
    outer_shape, inner_shape, x_outer, x_inner, grad_outer, grad_inner, mask_outer, mask_inner, out_outer, out_inner,
    first_outer, first_inner, second_outer, second_inner,
    batch_shape, x_batch, grad_batch, mask_batch, out_batch, first_batch, second_batch,
    M, N, tiles, across,
    OP: tl.constexpr, X: tl.constexpr, GRAD: tl.constexpr, MASK: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, AXIS: tl.constexpr, WHOLE: tl.constexpr, LONG: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    block = tl.program_id(0).to(I)
    batch, block = block // across, block % across
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
        counts = ~(a <= eps)  # otherwise the divisor is eps, a constant
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
    else:
        sums = tl.zeros([BM if AXIS == INNER else BN], tl.float64)
        for start in range(0, tiles, FLUSH):
            lanes = tl.zeros([BM, BN], C)
            for t in range(start, tl.minimum(start + FLUSH, tiles)):
                m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
                keep = kept_in(space, masks, m, n, MASK)
                v = fetch(xs, space, m, n, keep, X, True).to(C)
                g = fetch(gs, space, m, n, keep, GRAD, True).to(C)
                y, term = dot_term(v, g, keep, a, b, by, OP, C)
                lanes += term
            sums += tl.sum(lanes, ACROSS).to(tl.float64)
        dot = tl.expand_dims(sums, ACROSS).to(C)
        if OP == NORMALIZE:
            dot = tl.where(counts, dot, 0.0)
        for t in range(0, tiles):
            m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
            keep = kept_in(space, masks, m, n, MASK)
            v = fetch(xs, space, m, n, keep, X, True).to(C)
            g = fetch(gs, space, m, n, keep, GRAD, True).to(C)
            y, term = dot_term(v, g, keep, a, b, by, OP, C)
            edge = (m < M)[:, None] & (n < N)[None, :]
            store(outs, space, m, n, gradient_tile(y, g, keep, dot, by, OP, C), edge, OUT, True)


@triton.jit
def cosine_tile(
    space, x, y, block, t,
    X: tl.constexpr, Y: tl.constexpr, AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr,
    C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """Of the rows of two tiles: (unit, sum of squares) of each, and the sum of products, in units of both; fp64."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
    edge = (m < space[0])[:, None] & (n < space[1])[None, :]
    a = tl.where(edge, fetch(x, space, m, n, edge, X, True).to(C), 0.0)
    b = tl.where(edge, fetch(y, space, m, n, edge, Y, True).to(C), 0.0)
    unit1, a, squares1 = scaled_squares(a, ACROSS)
    unit2, b, squares2 = scaled_squares(b, ACROSS)
    products = tl.sum(a * b, ACROSS, keep_dims=True)
    return (
        unit1.to(tl.float64), squares1.to(tl.float64), unit2.to(tl.float64), squares2.to(tl.float64),
        products.to(tl.float64),
    )  # fmt: skip


@triton.jit
def cosine_kernel(
    x, y, out, first, second,
    eps,
    outer_shape, inner_shape, x_outer, x_inner, y_outer, y_inner, out_outer, out_inner,
    first_outer, first_inner, second_outer, second_inner,
    batch_shape, x_batch, y_batch, out_batch, first_batch, second_batch,
    M, N, tiles, across,
    X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    AXIS: tl.constexpr, WHOLE: tl.constexpr, LONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FOLD: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """x . y / (max(|x|, eps) max(|y|, eps)) of each row, and both norms."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    block = tl.program_id(0).to(I)
    batch, block = block // across, block % across
    x = x + spread(batch, batch_shape, x_batch)
    y = y + spread(batch, batch_shape, y_batch)
    out = out + spread(batch, batch_shape, out_batch)
    first = first + spread(batch, batch_shape, first_batch)
    if SECOND:
        second = second + spread(batch, batch_shape, second_batch)
    space = (M, N, outer_shape, inner_shape)
    xs, ys, outs = (x, x_outer, x_inner), (y, y_outer, y_inner), (out, out_outer, out_inner)
    firsts, seconds = (first, first_outer, first_inner), (second, second_outer, second_inner)
    BO: tl.constexpr = BM if AXIS == INNER else BN
    if WHOLE:
        unit1, squares1, unit2, squares2, products = cosine_tile(
            space, xs, ys, block, 0, X, Y, AXIS, BM, BN, VEC, C, I
        )  # fmt: skip
    else:
        unit1 = tl.expand_dims(power_below(tl.zeros([BO], tl.float64)), ACROSS)
        unit2 = unit1
        squares1 = tl.expand_dims(tl.zeros([BO], tl.float64), ACROSS)
        squares2, products = squares1, squares1
        for t in range(0, tiles):
            new1, more1, new2, more2, more = cosine_tile(space, xs, ys, block, t, X, Y, AXIS, BM, BN, VEC, C, I)
            larger1, larger2 = tl.maximum(unit1, new1), tl.maximum(unit2, new2)
            old1, old2 = unit1 * reciprocal(larger1), unit2 * reciprocal(larger2)
            new1, new2 = new1 * reciprocal(larger1), new2 * reciprocal(larger2)
            squares1 = squares1 * (old1 * old1) + more1 * (new1 * new1)
            squares2 = squares2 * (old2 * old2) + more2 * (new2 * new2)
            products = products * (old1 * old2) + more * (new1 * new2)
            unit1, unit2 = larger1, larger2
    norm1, norm2 = tl.sqrt(squares1) * unit1, tl.sqrt(squares2) * unit2
    value = products * (unit1 * inverse(norm1, eps)) * (unit2 * inverse(norm2, eps))
    value = tl.where(value > 1, 1.0, tl.where(value < -1, -1.0, value))  # NaN stays
    m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
    if AXIS == INNER:
        inside = (m < M)[:, None]
    else:
        inside = (n < N)[None, :]
    store(outs, space, m, n, value.to(C), inside, OUT, True)
    store(firsts, space, m, n, norm1, inside, FIRST, True)
    store(seconds, space, m, n, norm2, inside, SECOND, True)


@triton.jit
def cosine_backward_kernel(
    x, y, grad, value, first, second, dx, dy,
    eps,
    outer_shape, inner_shape, x_outer, x_inner, y_outer, y_inner, grad_outer, grad_inner, value_outer, value_inner,
    first_outer, first_inner, second_outer, second_inner, dx_outer, dx_inner, dy_outer, dy_inner,
    batch_shape, x_batch, y_batch, grad_batch, value_batch, first_batch, second_batch, dx_batch, dy_batch,
    M, N, tiles, across,
    X: tl.constexpr, Y: tl.constexpr, GRAD: tl.constexpr, VALUE: tl.constexpr, FIRST: tl.constexpr,
    SECOND: tl.constexpr, DX: tl.constexpr, DY: tl.constexpr,
    AXIS: tl.constexpr, WHOLE: tl.constexpr, LONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    FOLD: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """With u = x / max(|x|, eps), v = y / max(|y|, eps): dx = (v - value u) grad / max(|x|, eps).

    No row is summed: a block takes one tile."""
    pid = tl.program_id(0).to(I)
    t, block = pid % tiles, pid // tiles
    batch, block = block // across, block % across
    x = x + spread(batch, batch_shape, x_batch)
    y = y + spread(batch, batch_shape, y_batch)
    grad = grad + spread(batch, batch_shape, grad_batch)
    value = value + spread(batch, batch_shape, value_batch)
    first = first + spread(batch, batch_shape, first_batch)
    if SECOND:
        second = second + spread(batch, batch_shape, second_batch)
    if DX:
        dx = dx + spread(batch, batch_shape, dx_batch)
    if DY:
        dy = dy + spread(batch, batch_shape, dy_batch)
    space = (M, N, outer_shape, inner_shape)
    xs, ys = (x, x_outer, x_inner), (y, y_outer, y_inner)
    m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
    nowhere = tl.zeros([1, 1], tl.int1)
    g = fetch((grad, grad_outer, grad_inner), space, m, n, nowhere, GRAD, True).to(tl.float64)
    c = fetch((value, value_outer, value_inner), space, m, n, nowhere, VALUE, True).to(C)
    norm1 = fetch((first, first_outer, first_inner), space, m, n, nowhere, FIRST, True)
    norm2 = fetch((second, second_outer, second_inner), space, m, n, nowhere, SECOND, True)
    by1, by2 = inverse(norm1, eps), inverse(norm2, eps)
    c1, c2 = tl.where(norm1 <= eps, 0.0, c), tl.where(norm2 <= eps, 0.0, c)  # where the divisor is eps, a constant
    edge = (m < M)[:, None] & (n < N)[None, :]
    u = times(fetch(xs, space, m, n, edge, X, True).to(C), by1, C)
    v = times(fetch(ys, space, m, n, edge, Y, True).to(C), by2, C)
    if DX:
        store((dx, dx_outer, dx_inner), space, m, n, times(v - c1 * u, g * by1, C), edge, DX, True)
    if DY:
        store((dy, dy_outer, dy_inner), space, m, n, times(u - c2 * v, g * by2, C), edge, DY, True)


CONSTANTS = ("AXIS", "WHOLE", "LONG", "BM", "BN", "FOLD", "GROUP", "VEC", "C", "I")
FORWARD = ("x", "mask", "out", "first", "second")
BACKWARD = ("x", "grad", "mask", "out", "first", "second")
COSINE_FORWARD = ("x", "y", "out", "first", "second")
COSINE_BACKWARD = ("x", "y", "grad", "value", "first", "second", "dx", "dy")


def declare(fn, operands, *first):
    return Kernel(
        fn,
        pointers=operands,
        floats=("eps",),
        operands=operands,
        tuples=("batch_shape", *(f"{name}_batch" for name in operands)),
        indices=("M", "N", "tiles", "across"),
        constants=(*first, *(name.upper() for name in operands), *CONSTANTS),
        configs={None: Config()},
    )


ROWS = declare(rows_kernel, FORWARD, "OP")
ROWS_BACKWARD = declare(rows_backward_kernel, BACKWARD, "OP")
COSINE = declare(cosine_kernel, COSINE_FORWARD)
COSINE_GRADIENT = declare(cosine_backward_kernel, COSINE_BACKWARD)

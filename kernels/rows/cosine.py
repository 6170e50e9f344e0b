"""The kernels of cosine_similarity, on the tiles of rows.py. Sums are kept in units of a power of two that is not far
below the largest element, and so neither overflow nor vanish.
"""

import triton
import triton.language as tl

from ..engine.elementwise import store
from ..engine.indexing import fetch, spread
from ..engine.reduction import INNER
from ..engine.scaling import power_below, product_beyond, reciprocal
from .rows import at_most, declare, inverse, one_a_row, scaled_squares, tile_at, times


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
def collapse(unit1, squares1, unit2, squares2, products, axis: tl.constexpr):
    """The states along one axis as one: sums of the largest units. In order, as a tree of a fixed shape."""
    larger1, larger2 = tl.max(unit1, axis, keep_dims=True), tl.max(unit2, axis, keep_dims=True)
    by1, by2 = unit1 * reciprocal(larger1), unit2 * reciprocal(larger2)
    return (
        larger1, tl.sum(squares1 * (by1 * by1), axis, keep_dims=True),
        larger2, tl.sum(squares2 * (by2 * by2), axis, keep_dims=True),
        tl.sum(products * (by1 * by2), axis, keep_dims=True),
    )  # fmt: skip


@triton.jit
def combine(
    unit1, squares1, unit2, squares2, products, new1, more1, new2, more2, more
):  # fmt: skip
    larger1, larger2 = tl.maximum(unit1, new1), tl.maximum(unit2, new2)
    old1, old2 = unit1 * reciprocal(larger1), unit2 * reciprocal(larger2)
    new1, new2 = new1 * reciprocal(larger1), new2 * reciprocal(larger2)
    return (
        larger1, squares1 * (old1 * old1) + more1 * (new1 * new1),
        larger2, squares2 * (old2 * old2) + more2 * (new2 * new2),
        products * (old1 * old2) + more * (new1 * new2),
    )  # fmt: skip


@triton.jit
def nothing(BO: tl.constexpr, ACROSS: tl.constexpr):
    """The state of no elements."""
    zero = tl.expand_dims(tl.zeros([BO], tl.float64), ACROSS)
    unit = power_below(zero)
    return unit, zero, unit, zero, zero


@triton.jit
def gather(
    partial, splits, kept, rows, BS: tl.constexpr, BO: tl.constexpr, ACROSS: tl.constexpr
):  # fmt: skip
    """The state of all splits, in order of split whoever wrote last."""
    size = splits * rows
    unit1, squares1, unit2, squares2, products = nothing(BO, ACROSS)
    for start in range(0, splits, BS):
        s = start + tl.arange(0, BS)
        # .cg: from L2, where the other blocks' stores are; L1 may hold what an earlier launch left there
        inside = tl.expand_dims(s < splits, 1 - ACROSS) & tl.expand_dims(kept < rows, ACROSS)
        where = partial + tl.expand_dims(s, 1 - ACROSS) * rows + tl.expand_dims(kept, ACROSS)
        more1 = tl.load(where + size, mask=inside, other=0.0, cache_modifier=".cg")
        more2 = tl.load(where + size * 3, mask=inside, other=0.0, cache_modifier=".cg")
        more = tl.load(where + size * 4, mask=inside, other=0.0, cache_modifier=".cg")
        new1 = tl.where(inside, tl.load(where, mask=inside, other=0.0, cache_modifier=".cg"), power_below(more * 0))
        new2 = tl.load(where + size * 2, mask=inside, other=0.0, cache_modifier=".cg")
        new2 = tl.where(inside, new2, power_below(more * 0))
        new1, more1, new2, more2, more = collapse(new1, more1, new2, more2, more, ACROSS)
        unit1, squares1, unit2, squares2, products = combine(
            unit1, squares1, unit2, squares2, products, new1, more1, new2, more2, more
        )
    return unit1, squares1, unit2, squares2, products


@triton.jit
def finish(
    unit1, squares1, unit2, squares2, products, eps, block, space, out, first, second,
    OUT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, AXIS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    norm1, norm2 = product_beyond(tl.sqrt(squares1), unit1), product_beyond(tl.sqrt(squares2), unit2)
    value = products * (unit1 * inverse(norm1, eps)) * (unit2 * inverse(norm2, eps))
    value = tl.where(value > 1, 1.0, tl.where(value < -1, -1.0, value))  # NaN stays
    m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
    inside = one_a_row(space, m, n, AXIS)
    store(out, space, m, n, value.to(C), inside, OUT, True)
    store(first, space, m, n, norm1, inside, FIRST, True)
    store(second, space, m, n, norm2, inside, SECOND, True)


@triton.jit
def cosine_kernel(
    x, y, out, first, second, partial, counter,
    eps,
    outer_shape, inner_shape, x_outer, x_inner, y_outer, y_inner, out_outer, out_inner,
    first_outer, first_inner, second_outer, second_inner,
    batch_shape, x_batch, y_batch, out_batch, first_batch, second_batch,
    M, N, tiles, across, groups, splits, per_split,
    X: tl.constexpr, Y: tl.constexpr, OUT: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    AXIS: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr, LONG: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    I: tl.constexpr,
):  # fmt: skip
    """x . y / (max(|x|, eps) max(|y|, eps)) of each row, and both norms."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    BO: tl.constexpr = BM if AXIS == INNER else BN
    split, group = tl.program_id(0).to(I) % splits, tl.program_id(0).to(I) // splits
    batch, block = group // across, group % across
    x = x + spread(batch, batch_shape, x_batch)
    y = y + spread(batch, batch_shape, y_batch)
    out = out + spread(batch, batch_shape, out_batch)
    first = first + spread(batch, batch_shape, first_batch)
    second = second + spread(batch, batch_shape, second_batch)
    space = (M, N, outer_shape, inner_shape)
    xs, ys, outs = (x, x_outer, x_inner), (y, y_outer, y_inner), (out, out_outer, out_inner)
    firsts, seconds = (first, first_outer, first_inner), (second, second_outer, second_inner)
    if WHOLE:
        unit1, squares1, unit2, squares2, products = cosine_tile(
            space, xs, ys, block, 0, X, Y, AXIS, BM, BN, VEC, C, I
        )  # fmt: skip
    else:
        unit1, squares1, unit2, squares2, products = nothing(BO, ACROSS)
        for t in range(split * per_split, tl.minimum(split * per_split + per_split, tiles)):
            new1, more1, new2, more2, more = cosine_tile(space, xs, ys, block, t, X, Y, AXIS, BM, BN, VEC, C, I)
            unit1, squares1, unit2, squares2, products = combine(
                unit1, squares1, unit2, squares2, products, new1, more1, new2, more2, more
            )
    if SPLIT:
        rows = groups.to(I) * BO
        size = splits * rows
        kept = group * BO + tl.arange(0, BO).to(I)
        where = partial + split * rows + tl.expand_dims(kept, ACROSS)
        tl.store(where, unit1)
        tl.store(where + size, squares1)
        tl.store(where + size * 2, unit2)
        tl.store(where + size * 3, squares2)
        tl.store(where + size * 4, products)
        # who counts last sees every partial, as in reduction.py
        tl.debug_barrier()
        done = tl.atomic_add(counter + group, 1, sem="acq_rel", scope="gpu")
        if done == splits - 1:
            unit1, squares1, unit2, squares2, products = gather(partial, splits, kept, rows, BS, BO, ACROSS)
            finish(
                unit1, squares1, unit2, squares2, products, eps, block, space, outs, firsts, seconds,
                OUT, FIRST, SECOND, AXIS, BM, BN, VEC, C, I,
            )  # fmt: skip
            tl.store(counter + group, 0)
    else:
        finish(
            unit1, squares1, unit2, squares2, products, eps, block, space, outs, firsts, seconds,
            OUT, FIRST, SECOND, AXIS, BM, BN, VEC, C, I,
        )  # fmt: skip


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
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
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
    c1 = tl.where(at_most(norm1, eps), 0.0, c)  # where the divisor is eps, a constant
    c2 = tl.where(at_most(norm2, eps), 0.0, c)
    edge = (m < M)[:, None] & (n < N)[None, :]
    u = times(fetch(xs, space, m, n, edge, X, True).to(C), by1, C)
    v = times(fetch(ys, space, m, n, edge, Y, True).to(C), by2, C)
    if DX:
        store((dx, dx_outer, dx_inner), space, m, n, times(v - c1 * u, g * by1, C), edge, DX, True)
    if DY:
        store((dy, dy_outer, dy_inner), space, m, n, times(u - c2 * v, g * by2, C), edge, DY, True)


COSINE = declare(cosine_kernel, ("x", "y", "out", "first", "second"))
COSINE_BACKWARD = declare(
    cosine_backward_kernel, ("x", "y", "grad", "value", "first", "second", "dx", "dy"), split=False
)

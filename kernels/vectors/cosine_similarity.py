"""cosine_similarity: x1 . x2 / (max(|x1|, eps) max(|x2|, eps)) for each row; 0 where one is all zeros.

A state is (unit1, squares1, unit2, squares2, products): the sums of a row in units that are powers of two. Units are 1,
or near the row's largest elements, so that sums neither overflow nor vanish.
"""

from math import prod

import torch
import triton
import triton.language as tl

from ..engine.blocks import is_finished, load_partials
from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.math import rough_quotient, rounded_product, rounded_root
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import (
    TileConfig,
    at_most,
    declare,
    divisor,
    inverse,
    is_ordinary,
    one_per_row,
    part_of,
    piece_of,
    scaled_squares,
    tile_at,
    times,
)
from ..engine.row_plan import MAP, SUM, floor, launch, with_one_per_row
from ..engine.scaling import power_below, product_beyond, reciprocal
from ..engine.tensors import common_shape, like
from ..engine.tile import fetch, in_batch, store, within


@triton.jit
def cosine_tile(x, y, block, t, space, config):
    """The state of the rows of a tile: unit and sum of squares of x and of y, and sum of products in units of both."""
    C: tl.constexpr = config.C
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    m, n = tile_at(space, block, t, config)
    edge = within(space, m, n)
    a = tl.where(edge, fetch(x, space, m, n, edge, True).to(C), 0.0)  # (BM, BN)
    b = tl.where(edge, fetch(y, space, m, n, edge, True).to(C), 0.0)
    squares1 = tl.sum(rounded_product(a, a), ACROSS, keep_dims=True)  # (BM, 1), or (1, BN) for rows across memory
    squares2 = tl.sum(rounded_product(b, b), ACROSS, keep_dims=True)
    products = tl.sum(rounded_product(a, b), ACROSS, keep_dims=True)
    unit1 = tl.full(squares1.shape, 1.0, C)
    unit2 = unit1
    inside = one_per_row(space, m, n, config)
    if not (is_ordinary(squares1, inside) & is_ordinary(squares2, inside)):
        unit1, a, squares1 = scaled_squares(a, ACROSS)
        unit2, b, squares2 = scaled_squares(b, ACROSS)
        products = tl.sum(rounded_product(a, b), ACROSS, keep_dims=True)
    return unit1, squares1, unit2, squares2, products


@triton.jit
def widened(state):
    return tl.tuple([s.to(tl.float64) for s in state])


@triton.jit
def merge_along(state, axis: tl.constexpr):
    """Merges the states along one axis, in the largest units. Sums are trees of a fixed shape."""
    unit1, squares1, unit2, squares2, products = state
    larger1, larger2 = tl.max(unit1, axis, keep_dims=True), tl.max(unit2, axis, keep_dims=True)
    by1, by2 = unit1 * reciprocal(larger1), unit2 * reciprocal(larger2)
    return (
        larger1, tl.sum(rounded_product(squares1, by1 * by1), axis, keep_dims=True),
        larger2, tl.sum(rounded_product(squares2, by2 * by2), axis, keep_dims=True),
        tl.sum(rounded_product(products, by1 * by2), axis, keep_dims=True),
    )  # fmt: skip


@triton.jit
def merge(a, b):
    unit1, squares1, unit2, squares2, products = a
    new1, more1, new2, more2, more = b
    larger1, larger2 = tl.maximum(unit1, new1), tl.maximum(unit2, new2)
    old1, old2 = unit1 * reciprocal(larger1), unit2 * reciprocal(larger2)
    new1, new2 = new1 * reciprocal(larger1), new2 * reciprocal(larger2)
    return (
        larger1, squares1 * (old1 * old1) + more1 * (new1 * new1),
        larger2, squares2 * (old2 * old2) + more2 * (new2 * new2),
        products * (old1 * old2) + more * (new1 * new2),
    )  # fmt: skip


@triton.jit
def empty_state(BO: tl.constexpr, ACROSS: tl.constexpr):
    zero = tl.expand_dims(tl.zeros([BO], tl.float64), ACROSS)
    unit = power_below(zero)
    return unit, zero, unit, zero, zero


@triton.jit
def merge_partials(partial, pieces, output, rows, BS: tl.constexpr, BO: tl.constexpr, ACROSS: tl.constexpr):
    """Merges the states of all pieces, in order of piece, whichever block finished last."""
    size = pieces * rows
    state = empty_state(BO, ACROSS)
    for first in range(0, pieces, BS):
        unit1, inside = load_partials(partial, pieces, first, output, rows, BS, ACROSS)
        squares1 = load_partials(partial + size, pieces, first, output, rows, BS, ACROSS)[0]
        unit2 = load_partials(partial + size * 2, pieces, first, output, rows, BS, ACROSS)[0]
        squares2 = load_partials(partial + size * 3, pieces, first, output, rows, BS, ACROSS)[0]
        products = load_partials(partial + size * 4, pieces, first, output, rows, BS, ACROSS)[0]
        least = power_below(products * 0)
        unit1, unit2 = tl.where(inside, unit1, least), tl.where(inside, unit2, least)
        state = merge(state, merge_along((unit1, squares1, unit2, squares2, products), ACROSS))
    return state


CosineConfig = constants("AXIS WHOLE BM BN BS VEC C I")


@triton.jit
def embedding_loss(cosine, target, margin):
    """1 - cosine where the target is 1, max(cosine - margin, 0) where it is -1, NaN where it is NaN, else 0."""
    d = cosine - margin
    other = tl.where(target == target, 0.0, float("nan")).to(cosine.dtype)
    apart = tl.where(target == -1, tl.where(d <= 0, 0.0, d), other)
    return tl.where(target == 1, 1 - cosine, apart)


@triton.jit
def cosine_kernel(
    x: Operand, y: Operand, target: Operand, keep: Operand, loss: Operand, out: Operand, first: Operand,
    second: Operand, partial: tl.pointer_type, counter: tl.pointer_type, eps: tl.float64, margin: tl.float64,
    space: Space, parts: Parts, config: CosineConfig,
):  # fmt: skip
    """Writes x . y / (max(|x|, eps) max(|y|, eps)) and both norms of each row, and given a target the loss. With
    `keep`, all are 0 where a row is not kept."""
    I: tl.constexpr = config.I
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    BO: tl.constexpr = config.BM if config.AXIS == INNER else config.BN
    split, group, batch, block = part_of(parts.splits, parts.across, I)
    space = in_batch(space, batch, (x, y, target, keep, loss, out, first, second))
    finished = True
    if config.WHOLE:
        state = cosine_tile(x, y, block, 0, space, config)
    else:
        pieces, rows = parts.pieces, parts.groups.to(I) * BO
        output = group * BO + tl.arange(0, BO).to(I)
        for piece in range(split * parts.per_split, tl.minimum((split + 1) * parts.per_split, pieces)):
            state = empty_state(BO, ACROSS)
            start, end = piece_of(piece, parts)
            for t in range(start, end):
                state = merge(state, widened(cosine_tile(x, y, block, t, space, config)))
            pointer = partial + piece * rows + tl.expand_dims(output, ACROSS)
            for i in tl.static_range(5):
                tl.store(pointer + pieces * rows * i, state[i])
        finished = is_finished(counter + group, parts.splits)
    if finished:
        if not config.WHOLE:
            state = merge_partials(partial, pieces, output, rows, config.BS, BO, ACROSS)
        unit1, squares1, unit2, squares2, products = state
        root1, root2 = rounded_root(squares1), rounded_root(squares2)
        norm1 = product_beyond(root1.to(tl.float64), unit1.to(tl.float64))
        norm2 = product_beyond(root2.to(tl.float64), unit2.to(tl.float64))
        value = rough_quotient(rough_quotient(products, divisor(root1, unit1, eps)), divisor(root2, unit2, eps))
        value = tl.where(value > 1, 1.0, tl.where(value < -1, -1.0, value))  # NaN stays
        m, n = tile_at(space, block, 0, config)
        inside = one_per_row(space, m, n, config)
        value = value.to(config.C)
        if target is not None:
            small = tl.full([1, 1], margin, config.C)
            result = embedding_loss(value, fetch(target, space, m, n, inside, True), small)
            if keep is not None:
                kept = fetch(keep, space, m, n, inside, True) != 0
                result, value = tl.where(kept, result, 0.0), tl.where(kept, value, 0.0)
                norm1, norm2 = tl.where(kept, norm1, 0.0), tl.where(kept, norm2, 0.0)
            store(loss, space, m, n, result, inside, True)
        store(out, space, m, n, value, inside, True)
        store(first, space, m, n, norm1, inside, True)
        store(second, space, m, n, norm2, inside, True)


@triton.jit
def cosine_backward_kernel(
    x: Operand, y: Operand, target: Operand, grad: Operand, value: Operand, first: Operand, second: Operand,
    dx: Operand, dy: Operand, eps: tl.float64, margin: tl.float64, space: Space, parts: Parts, config: TileConfig,
):  # fmt: skip
    """With u = x / max(|x|, eps), v = y / max(|y|, eps): dx = (v - value u) grad / max(|x|, eps), dy likewise.

    No row is summed: a block takes one tile."""
    C: tl.constexpr = config.C
    t, _, batch, block = part_of(parts.tiles, parts.across, config.I)
    space = in_batch(space, batch, (x, y, target, grad, value, first, second, dx, dy))
    m, n = tile_at(space, block, t, config)
    nowhere = tl.zeros([1, 1], tl.int1)
    # one number per row: (BM, 1), or (1, BN) for rows across memory
    g = fetch(grad, space, m, n, nowhere, True).to(C)
    c = fetch(value, space, m, n, nowhere, True).to(C)
    if target is not None:  # the slope of embedding_loss
        sign = fetch(target, space, m, n, nowhere, True)
        apart = (sign == -1) & ~(c <= tl.full([1, 1], margin, C))
        g = tl.where(sign == 1, -g, tl.where(apart, g, 0.0))
    norm1 = fetch(first, space, m, n, nowhere, True)
    norm2 = fetch(second, space, m, n, nowhere, True)
    by1, by2 = inverse(norm1, eps, C), inverse(norm2, eps, C)
    c1 = tl.where(at_most(norm1, eps), 0.0, c)  # 0 where the divisor is eps, a constant
    c2 = tl.where(at_most(norm2, eps), 0.0, c)
    edge = within(space, m, n)
    u = times(fetch(x, space, m, n, edge, True).to(C), by1)  # (BM, BN)
    v = times(fetch(y, space, m, n, edge, True).to(C), by2)
    if target is not None:  # a row that is not kept has norms of 0
        u, v = tl.where(norm1 == 0, 0.0, u), tl.where(norm2 == 0, 0.0, v)
    if dx is not None:
        store(dx, space, m, n, times(v - c1 * u, (g * by1[0], by1[1])), edge, True)
    if dy is not None:
        store(dy, space, m, n, times(u - c2 * v, (g * by2[0], by2[1])), edge, True)


COSINE = declare(cosine_kernel, max_registers=(80, 128))
COSINE_BACKWARD = declare(cosine_backward_kernel)
PER_ROW, BACKWARD_PER_ROW = tuple(range(2, 8)), tuple(range(2, 7))


def cosine_similarity(x1, x2, dim=-1, eps=None):
    shape, compute, device = common_shape(x1, x2), compute_dtype(x1, x2), x1.device
    dim = dim % max(len(shape), 1)
    rows = with_one_per_row(shape, dim)
    value = empty(rows, compute, device)
    norm1, norm2 = empty(rows, torch.float64, device), empty(rows, torch.float64, device)
    if value.numel():
        launch(
            "cosine_similarity", COSINE, (x1, x2, None, None, None, value, norm1, norm2), PER_ROW, shape, dim, compute,
            (floor(eps, compute), 0.0), phases=SUM, partials=5,
        )  # fmt: skip
    return value.squeeze(dim) if shape else value, norm1, norm2


def cosine_similarity_backward(grad, x1, x2, value, norm1, norm2, dim=-1, eps=None, need_x1=True, need_x2=True):
    """Gradients of the full shape, for the caller to sum. That of a broadcast operand is in the compute dtype."""
    shape, compute = common_shape(x1, x2), compute_dtype(x1, x2, grad)
    dim = dim % max(len(shape), 1)
    if shape:
        grad, value = grad.unsqueeze(dim), value.unsqueeze(dim)
    dtypes = [x.dtype if x.shape == shape else compute for x in (x1, x2)]
    dx1, dx2 = (
        like(x, shape, dtype) if needed else None for x, dtype, needed in zip((x1, x2), dtypes, (need_x1, need_x2))
    )
    if prod(shape) and (need_x1 or need_x2):
        launch(
            "cosine_similarity_backward", COSINE_BACKWARD, (x1, x2, None, grad, value, norm1, norm2, dx1, dx2),
            BACKWARD_PER_ROW, shape, dim, compute, (floor(eps, compute_dtype(x1, x2)), 0.0), phases=MAP,
        )  # fmt: skip
    return tuple(x1.new_empty(0, dtype=dtype) if dx is None else dx for dx, dtype in zip((dx1, dx2), dtypes))

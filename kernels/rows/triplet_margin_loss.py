"""triplet_margin_loss: max(|a - p| - |a - n| + margin, 0) for each row; with SWAP the distance of p and n, where less.

A difference is x - y + eps, as torch's, and equal vectors are at distance 0. The state of a distance is (unit, squares,
differ): the sum of squares in a unit that is a power of two, and whether the vectors differ anywhere, 1 or 0.
"""

import torch
import triton
import triton.language as tl

from ..engine.blocks import is_last, load_partials
from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.scaling import power_below, reciprocal
from ..engine.tile import fetch, store, within
from .plan import MAP, SUM, launch
from .row import at_batch, declare, one_per_row, part_of, scaled_squares, tile_at, times


@triton.jit
def distance_tile(x, y, eps, edge, ACROSS: tl.constexpr):
    """The state of each row of a tile, in fp64."""
    d = x - y
    differ = tl.max(((d != 0) & edge).to(tl.int32), ACROSS, keep_dims=True)  # NaN does
    unit, _, squares = scaled_squares(tl.where(edge, d + eps, 0.0), ACROSS)
    return unit.to(tl.float64), squares.to(tl.float64), differ.to(tl.float64)


@triton.jit
def merge(a, b):
    unit, squares, differ = a
    new, more, other = b
    larger = tl.maximum(unit, new)
    unit, new = unit * reciprocal(larger), new * reciprocal(larger)
    return larger, squares * (unit * unit) + more * (new * new), tl.maximum(differ, other)


@triton.jit
def merge_partials(partial, size, splits, output, rows, BS: tl.constexpr, BO: tl.constexpr, ACROSS: tl.constexpr):
    """The state of all splits, in order of split whoever wrote last."""
    state = empty_state(BO, ACROSS)
    for first in range(0, splits, BS):
        unit, inside = load_partials(partial, splits, first, output, rows, BS, ACROSS)
        squares = load_partials(partial + size, splits, first, output, rows, BS, ACROSS)[0]
        differ = load_partials(partial + size * 2, splits, first, output, rows, BS, ACROSS)[0]
        unit = tl.where(inside, unit, power_below(unit * 0))
        larger = tl.max(unit, ACROSS, keep_dims=True)
        by = unit * reciprocal(larger)
        squares = tl.sum(squares * (by * by), ACROSS, keep_dims=True)
        state = merge(state, (larger, squares, tl.max(differ, ACROSS, keep_dims=True)))
    return state


@triton.jit
def empty_state(BO: tl.constexpr, ACROSS: tl.constexpr):
    zero = tl.expand_dims(tl.zeros([BO], tl.float64), ACROSS)
    return power_below(zero), zero, zero


@triton.jit
def distance(state):
    unit, squares, differ = state
    return tl.where(differ == 0, 0.0, tl.sqrt(squares) * unit)


@triton.jit
def excess(near, far, apart, margin, SWAP: tl.constexpr):
    if SWAP:
        far = tl.where((far < apart) | (far != far), far, apart)  # NaN stays
    return near - far + margin


@triton.jit
def triplet_kernel(
    x, y, z, keep, loss, near, far, apart, partial, counter,
    margin, eps,
    outer_shape, inner_shape, x_outer, x_inner, y_outer, y_inner, z_outer,
    z_inner, keep_outer, keep_inner, loss_outer, loss_inner, near_outer, near_inner, far_outer, far_inner,
    apart_outer, apart_inner,
    batch_shape, x_batch, y_batch, z_batch, keep_batch, loss_batch, near_batch, far_batch,
    apart_batch,
    M, N, tiles, across, groups, splits, per_split,
    SWAP: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, KEEP: tl.constexpr,
    LOSS: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, APART: tl.constexpr,
    AXIS: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr, LONG: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    I: tl.constexpr,
):  # fmt: skip
    """The loss of each row, and its distances; all 0 where a row is not kept."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    BO: tl.constexpr = BM if AXIS == INNER else BN
    split, group, batch, block = part_of(splits, across, I)
    space = (M, N, outer_shape, inner_shape)
    xs = at_batch(x, x_outer, x_inner, x_batch, batch, batch_shape)
    ys = at_batch(y, y_outer, y_inner, y_batch, batch, batch_shape)
    zs = at_batch(z, z_outer, z_inner, z_batch, batch, batch_shape)
    keeps = at_batch(keep, keep_outer, keep_inner, keep_batch, batch, batch_shape)
    losses = at_batch(loss, loss_outer, loss_inner, loss_batch, batch, batch_shape)
    nears = at_batch(near, near_outer, near_inner, near_batch, batch, batch_shape)
    fars = at_batch(far, far_outer, far_inner, far_batch, batch, batch_shape)
    aparts = at_batch(apart, apart_outer, apart_inner, apart_batch, batch, batch_shape)
    small = tl.full([1, 1], eps, C)
    state, other, third = empty_state(BO, ACROSS), empty_state(BO, ACROSS), empty_state(BO, ACROSS)
    for t in range(split * per_split, tl.minimum(split * per_split + per_split, tiles)):
        m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
        edge = within(space, m, n)
        a = fetch(xs, space, m, n, edge, X, True).to(C)
        p = fetch(ys, space, m, n, edge, Y, True).to(C)
        q = fetch(zs, space, m, n, edge, Z, True).to(C)
        state = merge(state, distance_tile(a, p, small, edge, ACROSS))
        other = merge(other, distance_tile(a, q, small, edge, ACROSS))
        if SWAP:
            third = merge(third, distance_tile(p, q, small, edge, ACROSS))
    finished = True
    if SPLIT:
        rows = groups.to(I) * BO
        size = splits * rows
        output = group * BO + tl.arange(0, BO).to(I)
        where = partial + split * rows + tl.expand_dims(output, ACROSS)
        for i in tl.static_range(3):
            tl.store(where + size * i, state[i])
            tl.store(where + size * (i + 3), other[i])
            if SWAP:
                tl.store(where + size * (i + 6), third[i])
        finished = is_last(counter + group, splits)
    if finished:
        if SPLIT:
            state = merge_partials(partial, size, splits, output, rows, BS, BO, ACROSS)
            other = merge_partials(partial + size * 3, size, splits, output, rows, BS, BO, ACROSS)
            if SWAP:
                third = merge_partials(partial + size * 6, size, splits, output, rows, BS, BO, ACROSS)
        to_positive, to_negative, between = distance(state), distance(other), distance(third)
        d = excess(to_positive, to_negative, between, margin, SWAP)
        value = tl.where(d <= 0, 0.0, d)
        m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
        inside = one_per_row(space, m, n, AXIS)
        if KEEP:
            kept = fetch(keeps, space, m, n, inside, KEEP, True) != 0
            value, to_positive = tl.where(kept, value, 0.0), tl.where(kept, to_positive, 0.0)
            to_negative, between = tl.where(kept, to_negative, 0.0), tl.where(kept, between, 0.0)
        store(losses, space, m, n, value.to(C), inside, LOSS, True)
        store(nears, space, m, n, to_positive, inside, NEAR, True)
        store(fars, space, m, n, to_negative, inside, FAR, True)
        if SWAP:
            store(aparts, space, m, n, between, inside, APART, True)


@triton.jit
def slope(x, y, eps, factor, norm, C: tl.constexpr):
    """factor (x - y + eps) / norm; 0 of equal vectors. (0 times a slope that is not finite is NaN, as everywhere.)"""
    by = factor / tl.where(norm == 0, 1.0, norm)
    none = (norm == 0) | ((factor == 0) & (norm < float("inf")))
    return tl.where(none, 0.0, times(x - y + eps, by, C))


@triton.jit
def triplet_backward_kernel(
    x, y, z, grad, near, far, apart, dx, dy, dz,
    margin, eps,
    outer_shape, inner_shape, x_outer, x_inner, y_outer, y_inner, z_outer,
    z_inner, grad_outer, grad_inner, near_outer, near_inner, far_outer, far_inner, apart_outer, apart_inner,
    dx_outer, dx_inner, dy_outer, dy_inner, dz_outer, dz_inner,
    batch_shape, x_batch, y_batch, z_batch, grad_batch, near_batch, far_batch, apart_batch,
    dx_batch, dy_batch, dz_batch,
    M, N, tiles, across,
    SWAP: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, GRAD: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr, APART: tl.constexpr, DX: tl.constexpr, DY: tl.constexpr, DZ: tl.constexpr,
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """No row is summed: a block takes one tile."""
    t, _, batch, block = part_of(tiles, across, I)
    space = (M, N, outer_shape, inner_shape)
    xs = at_batch(x, x_outer, x_inner, x_batch, batch, batch_shape)
    ys = at_batch(y, y_outer, y_inner, y_batch, batch, batch_shape)
    zs = at_batch(z, z_outer, z_inner, z_batch, batch, batch_shape)
    gs = at_batch(grad, grad_outer, grad_inner, grad_batch, batch, batch_shape)
    nears = at_batch(near, near_outer, near_inner, near_batch, batch, batch_shape)
    fars = at_batch(far, far_outer, far_inner, far_batch, batch, batch_shape)
    aparts = at_batch(apart, apart_outer, apart_inner, apart_batch, batch, batch_shape)
    dxs = at_batch(dx, dx_outer, dx_inner, dx_batch, batch, batch_shape)
    dys = at_batch(dy, dy_outer, dy_inner, dy_batch, batch, batch_shape)
    dzs = at_batch(dz, dz_outer, dz_inner, dz_batch, batch, batch_shape)
    m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
    nowhere = tl.zeros([1, 1], tl.int1)
    g = fetch(gs, space, m, n, nowhere, GRAD, True).to(tl.float64)
    to_positive = fetch(nears, space, m, n, nowhere, NEAR, True)
    to_negative = fetch(fars, space, m, n, nowhere, FAR, True)
    between = to_negative
    of_far, of_apart = tl.full([1, 1], 1.0, tl.float64), tl.full([1, 1], 0.0, tl.float64)
    if SWAP:  # the smaller distance has the slope; of equal ones each a half, as torch's minimum
        between = fetch(aparts, space, m, n, nowhere, APART, True)
        of_far = tl.where(to_negative == between, 0.5, tl.where(to_negative > between, 0.0, 1.0))
        of_apart = tl.where(to_negative == between, 0.5, tl.where(to_negative < between, 0.0, 1.0))
    g = tl.where(excess(to_positive, to_negative, between, margin, SWAP) <= 0, 0.0, g)
    edge = within(space, m, n)
    small = tl.full([1, 1], eps, C)
    a = fetch(xs, space, m, n, edge, X, True).to(C)
    p = fetch(ys, space, m, n, edge, Y, True).to(C)
    q = fetch(zs, space, m, n, edge, Z, True).to(C)
    of_positive = slope(a, p, small, g, to_positive, C)
    of_negative = slope(a, q, small, tl.where(of_far == 0, 0.0, -g * of_far), to_negative, C)
    of_both = tl.zeros([1, 1], C)
    if SWAP:
        of_both = slope(p, q, small, tl.where(of_apart == 0, 0.0, -g * of_apart), between, C)
    if DX:
        store(dxs, space, m, n, of_positive + of_negative, edge, DX, True)
    if DY:
        store(dys, space, m, n, of_both - of_positive, edge, DY, True)
    if DZ:
        store(dzs, space, m, n, -of_negative - of_both, edge, DZ, True)


FLOATS = ("margin", "eps")
VECTORS = ("x", "y", "z")
TRIPLET = declare(triplet_kernel, (*VECTORS, "keep", "loss", "near", "far", "apart"), "SWAP", floats=FLOATS)
TRIPLET_BACKWARD = declare(
    triplet_backward_kernel, (*VECTORS, "grad", "near", "far", "apart", "dx", "dy", "dz"), "SWAP", floats=FLOATS,
    split=False,
)  # fmt: skip


def each_row(*numbers):
    return tuple(None if x is None or not x.numel() else x.unsqueeze(-1) for x in numbers)


def prepare(anchor, positive, negative, keep, swap):
    """(the results, what a plan takes, its constants, its options)"""
    rows, compute = anchor.shape[:-1], compute_dtype(anchor, positive, negative)
    loss = empty(rows, compute, anchor.device)
    near, far, apart = (empty(shape, torch.float64, anchor.device) for shape in (rows, rows, rows if swap else (0,)))
    tensors = (anchor, positive, negative, *each_row(keep, loss, near, far, apart))
    plan = TRIPLET, tensors, (3, 4, 5, 6, 7), anchor.shape, anchor.dim() - 1, compute
    return (loss, near, far, apart), plan, {"SWAP": swap}, {"phases": SUM, "partials": 9 if swap else 6}


def triplet_margin_loss(anchor, positive, negative, keep, margin=1.0, p=2.0, eps=1e-6, swap=False):
    if p != 2:
        raise ValueError(f"_triplet_margin_loss: the kernel has p = 2 alone, got {p}")
    results, plan, constants, options = prepare(anchor, positive, negative, keep, swap)
    if results[0].numel():
        launch("triplet_margin_loss", *plan, (margin, eps), constants, **options)
    return results


def prepare_backward(grad, vectors, distances, swap, needed):
    compute = compute_dtype(*vectors, grad)
    slopes = tuple(torch.empty_like(x) if wanted else None for x, wanted in zip(vectors, needed))
    tensors = (*vectors, *each_row(grad, *distances), *slopes)
    plan = TRIPLET_BACKWARD, tensors, (3, 4, 5, 6), vectors[0].shape, vectors[0].dim() - 1, compute
    return slopes, plan, {"SWAP": swap}, {"phases": MAP}


def triplet_margin_loss_backward(
    grad, anchor, positive, negative, near, far, apart, margin=1.0, eps=1e-6, swap=False, *needed
):  # fmt: skip
    vectors = anchor, positive, negative
    slopes, plan, constants, options = prepare_backward(grad, vectors, (near, far, apart), swap, needed)
    if anchor.numel() and any(needed):
        launch("triplet_margin_loss_backward", *plan, (margin, eps), constants, **options)
    return tuple(x.new_empty(0) if dx is None else dx for x, dx in zip(vectors, slopes))

"""The backward of triplet_margin_loss: of |d| the slope d / |d|. No row is summed: a block takes one tile."""

import torch
import triton
import triton.language as tl

from ..engine.elementwise import compute_dtype
from ..engine.tile import fetch, store, within
from .plan import MAP, launch
from .row import at_batch, declare, part_of, tile_at, times
from .triplet_margin_loss import FLOATS, VECTORS, each_row, excess


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
    outer_shape, inner_shape, x_outer, x_inner, y_outer, y_inner, z_outer, z_inner, grad_outer, grad_inner,
    near_outer, near_inner, far_outer, far_inner, apart_outer, apart_inner, dx_outer, dx_inner, dy_outer, dy_inner,
    dz_outer, dz_inner,
    batch_shape, x_batch, y_batch, z_batch, grad_batch, near_batch, far_batch, apart_batch, dx_batch, dy_batch,
    dz_batch,
    M, N, tiles, across,
    SWAP: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, GRAD: tl.constexpr, NEAR: tl.constexpr,
    FAR: tl.constexpr, APART: tl.constexpr, DX: tl.constexpr, DY: tl.constexpr, DZ: tl.constexpr, AXIS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
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


TRIPLET_BACKWARD = declare(
    triplet_backward_kernel, (*VECTORS, "grad", "near", "far", "apart", "dx", "dy", "dz"), "SWAP", floats=FLOATS,
    split=False,
)  # fmt: skip


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

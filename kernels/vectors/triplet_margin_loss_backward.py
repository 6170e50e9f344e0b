"""The backward of triplet_margin_loss: |d| has the slope d / |d|. No row is summed: a block takes one tile."""

import torch
import triton
import triton.language as tl

from ..engine.elementwise import compute_dtype
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import declare, inverse, part_of, tile_at, times
from ..engine.row_loss import upstream
from ..engine.row_plan import MAP, launch
from ..engine.tile import fetch, in_batch, store, within
from .triplet_margin_loss import each_row, excess


@triton.jit
def slope(x, y, eps, factor, norm, C: tl.constexpr):
    """factor (x - y + eps) / norm; 0 for equal vectors, and for a factor of 0 unless the norm is infinite or NaN."""
    c, power = inverse(norm, -1.0, C)
    none = (norm == 0) | ((factor == 0) & (norm < float("inf")))
    return tl.where(none, 0.0, times(x - y + eps, (factor * c, power)))


TripletBackwardConfig = constants("SWAP AXIS BM BN VEC C I")


@triton.jit
def triplet_backward_kernel(
    x: Operand, y: Operand, z: Operand, grad: Operand, near: Operand, far: Operand, apart: Operand, dx: Operand,
    dy: Operand, dz: Operand, denominator: Operand, margin: tl.float64, eps: tl.float64, space: Space, parts: Parts,
    config: TripletBackwardConfig,
):  # fmt: skip
    C: tl.constexpr = config.C
    SWAP: tl.constexpr = config.SWAP
    t, _, batch, block = part_of(parts.tiles, parts.across, config.I)
    space = in_batch(space, batch, (x, y, z, grad, near, far, apart, dx, dy, dz))
    m, n = tile_at(space, block, t, config)
    nowhere = tl.zeros([1, 1], tl.int1)
    # one number per row: (BM, 1), or (1, BN) for rows across memory
    g = upstream(grad, denominator, space, m, n).to(C)
    to_positive = fetch(near, space, m, n, nowhere, True)
    to_negative = fetch(far, space, m, n, nowhere, True)
    between = to_negative
    of_far, of_apart = tl.full([1, 1], 1.0, C), tl.full([1, 1], 0.0, C)
    if SWAP:  # the smaller distance has the slope; equal ones have half each, as in torch.minimum
        between = fetch(apart, space, m, n, nowhere, True)
        of_far = tl.where(to_negative == between, 0.5, tl.where(to_negative > between, 0.0, 1.0))
        of_apart = tl.where(to_negative == between, 0.5, tl.where(to_negative < between, 0.0, 1.0))
    g = tl.where(excess(to_positive, to_negative, between, margin, SWAP) <= 0, 0.0, g)
    edge = within(space, m, n)
    small = tl.full([1, 1], eps, C)
    a = fetch(x, space, m, n, edge, True).to(C)  # (BM, BN)
    p = fetch(y, space, m, n, edge, True).to(C)
    q = fetch(z, space, m, n, edge, True).to(C)
    of_positive = slope(a, p, small, g, to_positive, C)  # g (a - p) / |a - p|
    of_negative = slope(a, q, small, tl.where(of_far == 0, 0.0, -g * of_far), to_negative, C)  # -g (a - n) / |a - n|
    of_both = tl.zeros([1, 1], C)
    if SWAP:
        of_both = slope(p, q, small, tl.where(of_apart == 0, 0.0, -g * of_apart), between, C)
    if dx is not None:
        store(dx, space, m, n, of_positive + of_negative, edge, True)
    if dy is not None:
        store(dy, space, m, n, of_both - of_positive, edge, True)
    if dz is not None:
        store(dz, space, m, n, -of_negative - of_both, edge, True)


TRIPLET_BACKWARD = declare(triplet_backward_kernel)


def prepare_backward(grad, vectors, distances, swap, needed, denominator=None):
    """grad: one number per row; 0-dim for the sum or mean of all rows. denominator: a mean's divisor, or None."""
    rows, compute = vectors[0].shape[:-1], compute_dtype(*vectors, grad)
    slopes = tuple(torch.empty_like(x) if wanted else None for x, wanted in zip(vectors, needed))
    shared = (None if t is None else t.expand(rows) for t in (grad, denominator))
    grad, denominator = each_row(*shared)
    tensors = (*vectors, grad, *each_row(*distances), *slopes, denominator)
    plan = TRIPLET_BACKWARD, tensors, (3, 4, 5, 6, 10), vectors[0].shape, vectors[0].dim() - 1, compute
    return slopes, plan, {"SWAP": swap}, {"phases": MAP}


def triplet_margin_loss_reduced_backward(
    grad, denominator, anchor, positive, negative, near, far, apart, margin=1.0, eps=1e-6, swap=False, *needed
):
    vectors, distances = (anchor, positive, negative), (near, far, apart)
    slopes, plan, constants, options = prepare_backward(grad, vectors, distances, swap, needed, denominator)
    if anchor.numel() and any(needed):
        launch("triplet_margin_loss_backward", *plan, (margin, eps), constants, **options)
    return tuple(x.new_empty(0) if dx is None else dx for x, dx in zip(vectors, slopes))


def triplet_margin_loss_backward(grad, *operands):
    return triplet_margin_loss_reduced_backward(grad, None, *operands)

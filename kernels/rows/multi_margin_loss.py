"""multi_margin_loss: 1/C sum_j max(margin - x_y + x_j, 0)^p over the classes j of each row but its own, y; and
dx_j = g/C times the term's slope, dx_y = -g/C times the sum of all slopes.

Forward and backward are one kernel: a row is read once, and its terms, or their slopes, are summed. The backward writes
each dx_j on the way; dx_y is 0 until the sum is there, and then an element that is written by itself.
"""

import torch
import triton
import triton.language as tl

from ..engine.blocks import add_partials, is_last
from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.tile import fetch, over_axis, store, within, within_lane
from ..engine.tiling import FLUSH
from .classification import at_class, at_row
from .plan import SUM, launch
from .row import at_batch, declare, one_per_row, part_of, shift_of, store_tile, tile_at


@triton.jit
def term_and_slope(d, SQUARE: tl.constexpr):
    """max(d, 0)^p, of slope 0 at 0. NaN stays."""
    term = tl.where(d <= 0, 0.0, d)
    slope = tl.where(d <= 0, 0.0, 1.0)
    if SQUARE:
        slope = 2 * term
        term *= term
    return term, slope


@triton.jit
def multi_margin_kernel(
    x, target, grad, loss, dx, partial, counter,
    margin,
    outer_shape, inner_shape, x_outer, x_inner, target_outer, target_inner, grad_outer, grad_inner, loss_outer,
    loss_inner, dx_outer, dx_inner,
    batch_shape, x_batch, target_batch, grad_batch, loss_batch, dx_batch,
    M, N, tiles, across, groups, splits, per_split,
    SQUARE: tl.constexpr, X: tl.constexpr, TARGET: tl.constexpr, GRAD: tl.constexpr, LOSS: tl.constexpr,
    DX: tl.constexpr, PEEL: tl.constexpr, AXIS: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr,
    LONG: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr, VEC: tl.constexpr,
    C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """loss, or of a grad dx. A row whose target is no class does not exist: both are 0."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    BO: tl.constexpr = BM if AXIS == INNER else BN
    split, group, batch, block = part_of(splits, across, I)
    space = (M, N, outer_shape, inner_shape)
    xs = at_batch(x, x_outer, x_inner, x_batch, batch, batch_shape)
    targets = at_batch(target, target_outer, target_inner, target_batch, batch, batch_shape)
    gs = at_batch(grad, grad_outer, grad_inner, grad_batch, batch, batch_shape)
    losses = at_batch(loss, loss_outer, loss_inner, loss_batch, batch, batch_shape)
    slopes = at_batch(dx, dx_outer, dx_inner, dx_batch, batch, batch_shape)
    if PEEL:
        space = (M, N, outer_shape, inner_shape, shift_of(xs, block, outer_shape, VEC, I))
    m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
    inside, nowhere = one_per_row(space, m, n, AXIS), tl.zeros([1, 1], tl.int1)
    classes = N if AXIS == INNER else M
    index = fetch(targets, space, m, n, nowhere, TARGET, True)
    exists = inside & (index >= 0) & (index < classes)
    place = tl.where(exists, index, 0).to(I)
    own = tl.load(xs[0] + at_row(space, xs, m, n, AXIS) + at_class(place, space, xs, AXIS), mask=exists, other=0).to(C)
    base = tl.full([1, 1], margin, C) - own
    if DX:
        g = fetch(gs, space, m, n, nowhere, GRAD, True).to(tl.float64) / classes
        factor = g.to(C)

    first = split * per_split
    last = tl.minimum(first + per_split, tiles)
    total = tl.zeros([BO], tl.float64)
    for start in range(first, last, FLUSH):
        lanes = within_lane(tl.zeros([BM, BN], C), BM, BN, LM, LN, VEC)
        for t in range(start, tl.minimum(start + FLUSH, last)):
            m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
            edge = within(space, m, n)
            others = exists & ((n[None, :] if AXIS == INNER else m[:, None]) != place)
            d = base + fetch(xs, space, m, n, edge, X, True, float("-inf")).to(C)
            term, slope = term_and_slope(d, SQUARE)
            if DX:
                value = tl.where((d <= 0) | ~others, 0.0, factor * slope)  # 0, too, where g is inf
                store_tile(slopes, space, block, t, m, n, value, DX, AXIS, BM, BN)
                term = slope
            lanes += within_lane(tl.where(edge & others, term, 0.0), BM, BN, LM, LN, VEC)
        total += over_axis(lanes, AXIS)

    finished = True
    if SPLIT:
        rows = groups.to(I) * BO
        output = group * BO + tl.arange(0, BO).to(I)
        tl.store(partial + split * rows + output, total)
        finished = is_last(counter + group, splits)
    elif DX:
        tl.debug_barrier()  # another thread's 0 comes before dx_y
    if finished:
        if SPLIT:
            total = add_partials(partial, splits, output, rows, BS, BO)[0]
        of_row = tl.expand_dims(total, ACROSS)
        m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)
        if DX:
            where = slopes[0] + at_row(space, slopes, m, n, AXIS) + at_class(place, space, slopes, AXIS)
            value = tl.where(of_row == 0, 0.0, -of_row * g)
            tl.store(where, value.to(C).to(dx.dtype.element_ty), mask=exists)
        else:
            value = tl.where(exists, of_row / classes, 0.0)
            store(losses, space, m, n, value.to(C), inside, LOSS, True)


OPERANDS = ("x", "target", "grad", "loss", "dx")
MULTI_MARGIN = declare(multi_margin_kernel, OPERANDS, "SQUARE", floats=("margin",))
PER_ROW = (1, 2, 3)
OPTIONS = {"phases": SUM, "partials": 1, "heads": True, "registers": (96, 128)}


def prepare(input, place, p, grad=None):
    """(the result, what a plan takes, its constants): of a gradient the backward's."""
    compute = compute_dtype(input)
    loss = empty(place.shape, compute, input.device) if grad is None else None
    dx = None if grad is None else torch.empty_like(input)
    rows = (None if t is None else t.unsqueeze(-1) for t in (place, grad, loss))
    plan = MULTI_MARGIN, (input, *rows, dx), PER_ROW, input.shape, input.dim() - 1, compute
    return (loss if dx is None else dx), plan, {"SQUARE": p == 2}


def multi_margin_loss(input, place, margin=1.0, p=1):
    loss, plan, constants = prepare(input, place, p)
    if loss.numel():
        launch("multi_margin_loss", *plan, (margin,), constants, **OPTIONS)
    return loss


def multi_margin_loss_backward(grad, input, place, margin=1.0, p=1):
    dx, plan, constants = prepare(input, place, p, grad)
    if dx.numel():
        launch("multi_margin_loss_backward", *plan, (margin,), constants, **OPTIONS)
    return dx

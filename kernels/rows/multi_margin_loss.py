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
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.tile import fetch, in_batch, over_axis, store, within, within_lane
from ..engine.tiling import FLUSH
from .classification import own_class
from .plan import SUM, launch
from .row import declare, one_per_row, part_of, peeled, store_tile, tile_at


@triton.jit
def term_and_slope(d, SQUARE: tl.constexpr):
    """max(d, 0)^p, of slope 0 at 0. NaN stays."""
    term = tl.where(d <= 0, 0.0, d)
    slope = tl.where(d <= 0, 0.0, 1.0)
    if SQUARE:
        slope = 2 * term
        term *= term
    return term, slope


MultiMarginConfig = constants("SQUARE PEEL AXIS SPLIT BM BN BS LM LN VEC C I")


@triton.jit
def multi_margin_kernel(
    x: Operand, target: Operand, grad: Operand, loss: Operand, dx: Operand, partial: tl.pointer_type,
    counter: tl.pointer_type, margin: tl.float64, space: Space, parts: Parts, config: MultiMarginConfig,
):  # fmt: skip
    """loss, or of a grad dx. A row whose target is no class does not exist: both are 0."""
    C: tl.constexpr = config.C
    I: tl.constexpr = config.I
    AXIS: tl.constexpr = config.AXIS
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    BO: tl.constexpr = config.BM if AXIS == INNER else config.BN
    split, group, batch, block = part_of(parts.splits, parts.across, I)
    space = in_batch(space, batch, (x, target, grad, loss, dx))
    if config.PEEL:
        space = peeled(space, x, block, config)
    m, n = tile_at(space, block, 0, config)
    # one number a row: (BM, 1), or of rows across memory (1, BN)
    inside, nowhere = one_per_row(space, m, n, config), tl.zeros([1, 1], tl.int1)
    classes = space.N if AXIS == INNER else space.M
    index = fetch(target, space, m, n, nowhere, True)
    exists = inside & (index >= 0) & (index < classes)
    place = tl.where(exists, index, 0).to(I)
    target_x = tl.load(own_class(place, x, space, m, n, config), mask=exists, other=0).to(C)  # x_y
    base = tl.full([1, 1], margin, C) - target_x
    if dx is not None:
        g = fetch(grad, space, m, n, nowhere, True).to(tl.float64) / classes
        factor = g.to(C)

    first = split * parts.per_split
    last = tl.minimum(first + parts.per_split, parts.tiles)
    total = tl.zeros([BO], tl.float64)
    for start in range(first, last, FLUSH):
        lanes = within_lane(tl.zeros([config.BM, config.BN], C), config)  # (LM, LN)
        for t in range(start, tl.minimum(start + FLUSH, last)):
            m, n = tile_at(space, block, t, config)
            edge = within(space, m, n)
            others = exists & ((n[None, :] if AXIS == INNER else m[:, None]) != place)
            d = base + fetch(x, space, m, n, edge, True, float("-inf")).to(C)  # (BM, BN): margin - x_y + x_j
            term, slope = term_and_slope(d, config.SQUARE)
            if dx is not None:
                value = tl.where((d <= 0) | ~others, 0.0, factor * slope)  # 0, too, where g is inf
                store_tile(dx, space, block, t, m, n, value, config)
                term = slope
            lanes += within_lane(tl.where(edge & others, term, 0.0), config)
        total += over_axis(lanes, config)

    finished = True
    if config.SPLIT:
        rows = parts.groups.to(I) * BO
        output = group * BO + tl.arange(0, BO).to(I)
        tl.store(partial + split * rows + output, total)
        finished = is_last(counter + group, parts.splits)
    elif dx is not None:
        tl.debug_barrier()  # another thread's 0 comes before dx_y
    if finished:
        if config.SPLIT:
            total = add_partials(partial, parts.splits, output, rows, config.BS, BO)[0]
        of_row = tl.expand_dims(total, ACROSS)
        m, n = tile_at(space, block, 0, config)
        if dx is not None:
            value = tl.where(of_row == 0, 0.0, -of_row * g)  # dx_y = -g/C sum of slopes
            pointer = own_class(place, dx, space, m, n, config)
            tl.store(pointer, value.to(C).to(dx.pointer.dtype.element_ty), mask=exists)
        else:
            value = tl.where(exists, of_row / classes, 0.0)
            store(loss, space, m, n, value.to(C), inside, True)


MULTI_MARGIN = declare(multi_margin_kernel)
PER_ROW = (1, 2, 3)
OPTIONS = {"phases": SUM, "partials": 1, "per_row_math": True, "registers": (96, 128)}


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

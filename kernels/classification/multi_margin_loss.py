"""multi_margin_loss: 1/C sum_j max(margin - x_y + x_j, 0)^p over the classes j of each row but its own class y. Its
gradient is dx_j = g/C times the slope of term j, dx_y = -g/C times the sum of these slopes.

The forward and the backward are one kernel: a row is read once, and its terms, or their slopes, are summed. The
backward writes each dx_j on the way, and overwrites dx_y by itself when it has the sum.
"""

import torch
import triton
import triton.language as tl

from ..engine.blocks import add_partials, is_finished
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import (
    declare,
    one_per_row,
    peeled,
    piece_of,
    split_of,
    store_tile,
    summed_tile,
    tile_at,
    tile_is_whole,
    written_tiles,
)
from ..engine.row_loss import (
    add_up,
    class_dim,
    class_of,
    own_class,
    per_class,
    per_row,
    reduced_results,
    reduction,
    row_results,
    upstream,
)
from ..engine.row_plan import SUM, launch
from ..engine.tile import fetch, in_batch, over_axis, store, within, within_lane


@triton.jit
def term_and_slope(d, SQUARE: tl.constexpr):
    """Returns (max(d, 0)^p, its slope), with slope 0 at 0. NaN stays."""
    term = tl.maximum(d, 0.0, propagate_nan=tl.PropagateNan.ALL)
    slope = tl.where(d <= 0, 0.0, 1.0)
    if SQUARE:
        slope = 2 * term
        term *= term
    return term, slope


@triton.jit
def write_tile(v, dx, base, factor, exists, block, t, m, n, space, config):
    d = base + v.to(config.C)  # margin - x_y + x_j
    _, slope = term_and_slope(d, config.SQUARE)
    store_tile(dx, space, block, t, m, n, tl.where((d <= 0) | ~exists, 0.0, factor * slope), config)


@triton.jit
def write_peeled(first, last, x, dx, base, factor, exists, block, space, config):
    """`write_tile` for PEELED rows: tiles begin with the 16 bytes that a row begins in."""
    space = peeled(space, x, block, config)
    for t in range(first, last):
        m, n = tile_at(space, block, t, config)
        v = fetch(x, space, m, n, within(space, m, n), True)
        write_tile(v, dx, base, factor, exists, block, t, m, n, space, config)


@triton.jit
def sum_tile(v, dx, base, factor, class_index, exists, block, t, space, config):
    """Adds up the terms of a tile v (BM, BN), or their slopes if there is a dx, by lane: (LM, LN)."""
    m, n = tile_at(space, block, t, config)
    term, slope = term_and_slope(base + v.to(config.C), config.SQUARE)
    if dx is not None:
        if not config.PEEL:
            write_tile(v, dx, base, factor, exists, block, t, m, n, space, config)
        term = slope
    term = tl.where((n[None, :] if config.AXIS == INNER else m[:, None]) == class_index, 0.0, term)
    if not tile_is_whole(space, block, t, config):
        term = tl.where(within(space, m, n), term, 0.0)
    return within_lane(term, config)


MultiMarginConfig = constants("SQUARE REDUCE EMPTY_NAN PEEL AXIS WHOLE BM BN BS LM LN VEC C I")


@triton.jit
def multi_margin_kernel(
    x: Operand, target: Operand, mask: Operand, grad: Operand, loss: Operand, keep: Operand, used: Operand,
    dx: Operand, weight: Operand, denominator: Operand, partial: tl.pointer_type, counter: tl.pointer_type,
    margin: tl.float64, space: Space, parts: Parts, config: MultiMarginConfig,
):  # fmt: skip
    """Writes loss or, given a grad, dx. REDUCE: `loss` is the sum or mean of all rows, and `used` the divisor of a
    mean. Loss and dx are 0 for a row that is not kept, and for a row whose class has weight 0, which a mean counts."""
    C: tl.constexpr = config.C
    I: tl.constexpr = config.I
    AXIS: tl.constexpr = config.AXIS
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    BO: tl.constexpr = config.BM if AXIS == INNER else config.BN
    split, group, batch, block = split_of(parts, config)
    space = in_batch(space, batch, (x, target, mask, grad, loss, keep, used, dx))
    m, n = tile_at(space, block, 0, config)
    if config.WHOLE:  # loaded before the class is known: only the arithmetic waits for the class
        v = fetch(x, space, m, n, within(space, m, n), True)
    # one number per row: (BM, 1), or (1, BN) for rows across memory
    class_index, exists, w = class_of(target, mask, weight, -1, space, m, n, config)
    target_x = tl.load(own_class(tl.where(exists, class_index, 0), x, space, m, n, config), mask=exists, other=0)  # x_y
    base = tl.full([1, 1], margin, C) - target_x.to(C)
    factor, g = base, w.to(tl.float64) / (space.N if AXIS == INNER else space.M)  # w_y / C
    if dx is not None:
        g *= upstream(grad, denominator, space, m, n)
        factor = g.to(C)

    finished = True
    if config.WHOLE:
        total = over_axis(sum_tile(v, dx, base, factor, class_index, exists, block, 0, space, config), config)
        if dx is not None:
            tl.debug_barrier()  # all threads have written dx before dx_y is overwritten
    else:
        pieces, rows = parts.pieces, parts.groups.to(I) * BO
        output = group * BO + tl.arange(0, BO).to(I)
        for piece in range(split * parts.per_split, tl.minimum((split + 1) * parts.per_split, pieces)):
            start, end = piece_of(piece, parts)
            lanes = within_lane(tl.zeros([config.BM, config.BN], C), config)
            for t in range(start, end):
                here, m, n, _ = summed_tile(space, block, t, config)
                v = fetch(x, here, m, n, within(space, m, n), True)
                lanes += sum_tile(v, dx, base, factor, class_index, exists, block, t, space, config)
            if config.PEEL and dx is not None:  # the tiles are read again, from a cache
                first, last = written_tiles(piece, piece + 1, parts)
                write_peeled(first, last, x, dx, base, factor, exists, block, space, config)
            tl.store(partial + piece * rows + output, over_axis(lanes, config))
        finished = is_finished(counter + group, parts.splits)
    if finished:
        if not config.WHOLE:
            total = add_partials(partial, pieces, output, rows, config.BS, BO)[0]
        of_row = tl.expand_dims(total, ACROSS)
        value = tl.where(exists, of_row * g, 0.0)
        m, n = tile_at(space, block, 0, config)
        if dx is not None:
            value = tl.where(of_row == 0, 0.0, -value)  # dx_y = -g/C sum of slopes; 0, too, where g is inf
            pointer = own_class(class_index, dx, space, m, n, config)
            tl.store(pointer, value.to(C).to(dx.pointer.dtype.element_ty), mask=exists)
        elif config.REDUCE:
            if not config.WHOLE:
                partial += pieces * rows
                counter += tl.where(parts.splits > 1, parts.groups, 0)
            add_up(value, class_index >= 0, w, loss, used, partial, counter, group, parts.groups, config, False)
        else:
            inside = one_per_row(space, m, n, config)
            store(loss, space, m, n, value.to(C), inside, True)
            store(keep, space, m, n, class_index >= 0, inside, True)


MULTI_MARGIN_BACKWARD = declare(multi_margin_kernel, max_registers=(80, 128))
MULTI_MARGIN = declare(  # four accesses a thread in flight; it writes none
    multi_margin_kernel, tile_bytes=16384, max_registers=(96, 128)
)
PER_ROW = (1, 2, 3, 4, 5, 6, 9)
OPTIONS = {"phases": SUM, "partials": 1, "per_row_math": True, "registers": (None, 128)}


def prepare(input, target, weight, mask, p, mean=None, empty_nan=False, grad=None, denominator=None):
    """Returns (results, arguments of row_plan.launch, its constants). mean: as in cross_entropy.prepare. grad: the
    result is dx. For a mean over all rows there is a denominator, and grad is one number."""
    x, dtype = input.movedim(-1, class_dim(input)), compute_dtype(input)
    if grad is not None:
        results = torch.empty_like(input)
        written = None, None, None, results.movedim(-1, class_dim(input))
    elif mean is None:
        results = row_results(x, dtype), row_results(x, torch.bool)
        written = *(per_row(t, x) for t in results), None, None
    else:
        results, (loss, used) = reduced_results(x, dtype)
        written = loss, None, used, None
    rows = (per_row(t, x) for t in (target, mask, grad))
    tensors = x, *rows, *written, per_class(weight, x), per_row(denominator, x)
    kernel = MULTI_MARGIN if grad is None else MULTI_MARGIN_BACKWARD
    plan = kernel, tensors, PER_ROW, x.shape, class_dim(x), compute_dtype(input, weight)
    return results, plan, {"SQUARE": p == 2} | reduction(mean, empty_nan)


def multi_margin_loss(input, target, weight=None, mask=None, margin=1.0, p=1):
    (loss, keep), plan, constants = prepare(input, target, weight, mask, p)
    if loss.numel():
        launch("multi_margin_loss", *plan, (margin,), constants, **OPTIONS)
    return loss, keep


def multi_margin_loss_reduced(input, target, weight=None, mask=None, margin=1.0, p=1, mean=True, empty_nan=False):
    """Returns (the mean or sum of all rows, what a mean divides by). There must be a row."""
    results, plan, constants = prepare(input, target, weight, mask, p, mean, empty_nan)
    launch("multi_margin_loss", *plan, (margin,), constants, **OPTIONS)
    return results


def multi_margin_loss_backward(grad, input, target, weight=None, mask=None, margin=1.0, p=1, denominator=None):
    """grad: one number per row; 0-dim for the sum or mean of all rows. denominator: a mean's divisor, or None."""
    dx, plan, constants = prepare(input, target, weight, mask, p, grad=grad, denominator=denominator)
    if dx.numel():
        launch("multi_margin_loss_backward", *plan, (margin,), constants, **OPTIONS)
    return dx


def multi_margin_loss_reduced_backward(grad, denominator, *operands):
    return multi_margin_loss_backward(grad, *operands, denominator)

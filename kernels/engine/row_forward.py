"""The forward of softmax and normalize: each result needs the whole of its row.

In fp32, tl.exp multiplies by log2(e) and takes the GPU's base 2 power. The error of exp(x - maximum) is 2 units in the
last place plus |x - maximum| / 2 for the multiplication; where x is far below the maximum, the power itself is small.
tl.log uses the GPU's base 2 logarithm.
"""

import triton
import triton.language as tl

from .accumulate import add_tiles
from .blocks import await_sums, count_summed, count_written, draw_ticket
from .indexing import INNER
from .math import rounded_quotient, rounded_root
from .operand import Operand, Parts, Space, constants
from .row import (
    again,
    declare,
    divisor,
    one_per_row,
    peeled,
    piece_of,
    scaled_squares,
    store_tile,
    tile_at,
    written_tiles,
)
from .scaling import product_beyond, reciprocal
from .state import EXPONENTIALS, SQUARES, merge_partials, store_state
from .tile import fetch, in_batch, kept, store, within

SOFTMAX, LOG_SOFTMAX, NORMALIZE = map(tl.constexpr, range(3))  # OP


@triton.jit
def softmax_tile(x, keep, maximum, total, OP: tl.constexpr):
    if OP == LOG_SOFTMAX:
        value = tl.where(keep, (x - maximum) - tl.log(total), float("-inf"))
    else:
        value = tl.where(keep, tl.exp(x - maximum) * (1 / total), 0.0)
    return value


@triton.jit
def write_rows(first_tile, last_tile, block, split, x, mask, out, first, second, state, eps, space, config):
    """Writes `out` for tiles [first_tile, last_tile) from the states of their whole rows. Split 0 also writes the
    maximum and total of each row (softmax) to `first` and `second`, or its norm (normalize) to `first`."""
    OP: tl.constexpr = config.OP
    C: tl.constexpr = config.C
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    # (BM, 1), or (1, BN) for rows across memory
    count, maximum, total = tl.tuple([tl.expand_dims(s.to(tl.float64), ACROSS) for s in (state[0], state[4], state[5])])
    m, n = tile_at(space, block, 0, config)
    inside = one_per_row(space, m, n, config) & (split == 0)
    if OP == NORMALIZE:
        root = tl.sqrt(total)
        norm = product_beyond(root, maximum)
        unit, by = maximum.to(C), (1 / divisor(root, maximum, eps)).to(C)
        store(first, space, m, n, norm, inside, True)
    else:
        # NaN where the definition has exp(inf - inf) or exp(-inf - -inf)
        odd = (maximum == float("inf")) | (total == float("inf")) | ((total == 0) & (count > 0))
        total = tl.where(odd, float("nan"), total)
        store(first, space, m, n, maximum, inside, True)
        store(second, space, m, n, total, inside, True)
        maximum, total = maximum.to(C), total.to(C)
    if config.PEEL:
        space = peeled(space, x, block, config)
    for t in range(first_tile, last_tile):
        m, n = tile_at(space, block, t, config)
        # (elements beside a PEELED row are not stored: without a mask they need no bounds here)
        keep = kept(mask, None, space, m, n, config, mask is not None or not config.PEEL)[0]
        v = fetch(x, space, m, n, keep, True).to(C)  # (BM, BN)
        if OP == NORMALIZE:
            value = v * reciprocal(unit) * by  # y = x / max(|x|, eps)
        else:
            value = softmax_tile(v, keep, maximum, total, OP)  # y = exp(x - maximum) / total, or log y
        store_tile(out, space, block, t, m, n, value, config)


@triton.jit
def sum_pieces(first, last, block, x, mask, partial, output, rows, space, parts, config, MODE: tl.constexpr):
    """Sums pieces [first, last) of each of a block's rows, and stores a state per piece and row among the partials."""
    for piece in range(first, last):
        start, end = piece_of(piece, parts)
        state = add_tiles(start, end, block, x, mask, None, space, config, MODE, False, False)
        store_state(partial + piece * rows + output, parts.pieces * rows, output < rows, state, MODE, False)


RowsConfig = constants("OP PEEL AXIS WHOLE WIDE SPLIT BM BN BS LM LN VEC C I")


@triton.jit
def rows_kernel(
    x: Operand, mask: Operand, out: Operand, first: Operand, second: Operand, partial: tl.pointer_type,
    counter: tl.pointer_type, eps: tl.float64, space: Space, parts: Parts, config: RowsConfig,
):  # fmt: skip
    """Writes out and, for each row in fp64, its maximum and total (softmax) or its norm (normalize)."""
    OP: tl.constexpr = config.OP
    AXIS: tl.constexpr = config.AXIS
    C: tl.constexpr = config.C
    I: tl.constexpr = config.I
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    if config.SPLIT:
        group, split, summing = draw_ticket(counter, parts.splits, parts.groups)
        group, split = group.to(I), split.to(I)
    else:
        group = tl.program_id(0).to(I)
    batch, block = group // parts.across, group % parts.across
    space = in_batch(space, batch, (x, mask, out, first, second))
    if config.WHOLE:
        m, n = tile_at(space, block, 0, config)
        inside = one_per_row(space, m, n, config)
        keep = kept(mask, None, space, m, n, config, True)[0]
        v = fetch(x, space, m, n, keep, True).to(C)  # (BM, BN)
        if OP == NORMALIZE:
            unit, scaled, squares = scaled_squares(tl.where(keep, v, 0.0), ACROSS)
            root = rounded_root(squares)
            norm = product_beyond(root.to(tl.float64), unit.to(tl.float64))
            value = scaled * rounded_quotient(1.0, divisor(root, unit, eps))  # y = x / max(|x|, eps)
            store(first, space, m, n, norm, inside, True)
        else:
            maximum = tl.max(tl.where(keep, v, float("-inf")), ACROSS, keep_dims=True)
            if config.WIDE and mask is not None:  # the mask is read again, from a cache: registers are short
                m = again(m, maximum, space)
                keep = kept(mask, None, space, m, n, config, True)[0]
            total = tl.sum(tl.where(keep, tl.exp(v - maximum), 0.0), ACROSS, keep_dims=True)
            if config.WIDE and mask is not None:
                m = again(m, total, space)
                keep = kept(mask, None, space, m, n, config, True)[0]
                if OP == LOG_SOFTMAX:
                    v = fetch(x, space, m, n, keep, True).to(C)
            value = softmax_tile(v, keep, maximum, total, OP)  # y = exp(x - maximum) / total, or log y
            store(first, space, m, n, maximum.to(tl.float64), inside, True)
            store(second, space, m, n, total.to(tl.float64), inside, True)
        edge = within(space, m, n)
        store(out, space, m, n, value, edge, True)
    else:
        MODE: tl.constexpr = SQUARES if OP == NORMALIZE else EXPONENTIALS
        BO: tl.constexpr = config.BM if AXIS == INNER else config.BN
        BS: tl.constexpr = config.BS
        splits, pieces, rows = parts.splits, parts.pieces, parts.groups.to(I) * BO
        output = group * BO + tl.arange(0, BO).to(I)
        if config.SPLIT:
            many = pieces > BS
            first_piece = split * parts.per_split
            last_piece = tl.minimum(first_piece + parts.per_split, pieces)
            if summing:
                sum_pieces(first_piece, last_piece, block, x, mask, partial, output, rows, space, parts, config, MODE)
                if (count_summed(counter, group) == splits - 1) & many:
                    state = merge_partials(partial, pieces, output, rows, pieces, MODE, False, BS, BO, C)
                    tl.debug_barrier()  # every thread has loaded the partials that are overwritten next
                    store_state(partial + output, pieces * rows, output < rows, state, MODE, False)
                    count_summed(counter, group)
            else:
                await_sums(counter, group, splits + many.to(tl.int32))
                summed = tl.where(many, 1, pieces)
                state = merge_partials(partial, pieces, output, rows, summed, MODE, False, BS, BO, C)
                first_tile, last_tile = written_tiles(first_piece, last_piece, parts)
                write_rows(first_tile, last_tile, block, split, x, mask, out, first, second, state, eps, space, config)
                count_written(counter, group, splits)
        else:
            zero = parts.tiles * 0
            sum_pieces(zero, pieces, block, x, mask, partial, output, rows, space, parts, config, MODE)
            tl.debug_barrier()  # every thread has stored its part of the partials
            state = merge_partials(partial, pieces, output, rows, pieces, MODE, False, BS, BO, C)
            write_rows(zero, parts.written, block, zero, x, mask, out, first, second, state, eps, space, config)


ROWS = declare(rows_kernel)

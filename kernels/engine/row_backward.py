"""The backward of softmax and normalize: a dot product along each row, and an elementwise function of it."""

import triton
import triton.language as tl

from .blocks import add_partials, await_sums, count_summed, count_written, draw_ticket
from .indexing import INNER, STRIDED, UNALIGNED
from .operand import Operand, Parts, Space
from .row import (
    again,
    at_most,
    declare,
    inverse,
    peeled,
    piece_of,
    store_tile,
    summed_tile,
    tile_at,
    times,
    written_tiles,
)
from .row_forward import LOG_SOFTMAX, NORMALIZE, SOFTMAX, RowsConfig
from .tile import fetch, in_batch, kept, store, within


@triton.jit
def dot_term(x, g, keep, first, second, by, OP: tl.constexpr, C: tl.constexpr):
    """Returns (y, the terms of the row's dot product): y = exp(x - maximum) / total, or x / norm."""
    if OP == NORMALIZE:
        y = times(x, by)
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
    """softmax: y (g - dot); log_softmax: g - y dot; normalize: (g - y dot) / norm."""
    if OP == SOFTMAX:
        value = y * (g - dot)
    else:
        value = g - y * dot
    if OP == NORMALIZE:
        value = times(value, by)
    return tl.where(keep, value, 0.0)


@triton.jit
def tile_terms(x, grad, mask, a, b, by, space, m, n, config, EDGE: tl.constexpr):
    """Returns (y, terms of the dot product, upstream gradient, keep) of a tile: (BM, BN) each."""
    C: tl.constexpr = config.C
    keep = kept(mask, None, space, m, n, config, EDGE)[0]
    v = fetch(x, space, m, n, keep, EDGE).to(C)
    g = fetch(grad, space, m, n, keep, EDGE).to(C)
    y, term = dot_term(v, g, keep, a, b, by, config.OP, C)
    return y, term, g, keep


@triton.jit
def dot_pieces(first, last, block, x, grad, mask, a, b, by, partial, output, rows, space, parts, config):
    """Sums pieces [first, last) of the dot products of a block's rows. Each piece's sums are stored as partials."""
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    for piece in range(first, last):
        start, end = piece_of(piece, parts)
        lanes = tl.zeros([config.BM, config.BN], config.C)
        for t in range(start, end):
            here, m, n, in_bounds = summed_tile(space, block, t, config)
            if in_bounds:
                lanes += tile_terms(x, grad, mask, a, b, by, here, m, n, config, False)[1]
            else:
                lanes += tile_terms(x, grad, mask, a, b, by, here, m, n, config, True)[1]
        tl.store(partial + piece * rows + output, tl.sum(lanes, ACROSS).to(tl.float64))


@triton.jit
def write_gradient(first_tile, last_tile, block, x, grad, mask, out, a, b, by, dot, space, config):
    OP: tl.constexpr = config.OP
    C: tl.constexpr = config.C
    if config.PEEL:
        space = peeled(space, x, block, config)
    for t in range(first_tile, last_tile):
        m, n = tile_at(space, block, t, config)
        # Elements beside a PEELED row are not stored: they need no bounds here, unless grad is loaded one by one.
        ONE_BY_ONE: tl.constexpr = grad.kind == STRIDED or grad.kind > UNALIGNED
        keep = kept(mask, None, space, m, n, config, mask is not None or not config.PEEL or ONE_BY_ONE)[0]
        v = fetch(x, space, m, n, keep, True).to(C)
        g = fetch(grad, space, m, n, keep, True).to(C)
        y, term = dot_term(v, g, keep, a, b, by, OP, C)
        store_tile(out, space, block, t, m, n, gradient_tile(y, g, keep, dot, by, OP, C), config)


@triton.jit
def rows_backward_kernel(
    x: Operand, grad: Operand, mask: Operand, out: Operand, first: Operand, second: Operand, partial: tl.pointer_type,
    counter: tl.pointer_type, eps: tl.float64, space: Space, parts: Parts, config: RowsConfig,
):  # fmt: skip
    """softmax: dx = y (g - sum y g); log_softmax: dx = g - y sum g; y = x / |x|: dx = (g - y sum y g) / |x|."""
    OP: tl.constexpr = config.OP
    C: tl.constexpr = config.C
    I: tl.constexpr = config.I
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    if config.SPLIT:
        group, split, summing = draw_ticket(counter, parts.splits, parts.groups)
        group, split = group.to(I), split.to(I)
    else:
        group = tl.program_id(0).to(I)
    batch, block = group // parts.across, group % parts.across
    space = in_batch(space, batch, (x, grad, mask, out, first, second))
    m, n = tile_at(space, block, 0, config)
    nowhere = tl.zeros([1, 1], tl.int1)
    a = fetch(first, space, m, n, nowhere, True)  # one number per row: (BM, 1), or (1, BN)
    if OP == NORMALIZE:
        by = inverse(a, eps, C)
        b = a
        counts = ~at_most(a, eps)  # elsewhere the divisor is the constant eps
    else:
        b = fetch(second, space, m, n, nowhere, True).to(C)
        a = a.to(C)
        by = a, b
        counts = True
    if config.WHOLE:
        y, term, g, keep = tile_terms(x, grad, mask, a, b, by, space, m, n, config, True)
        dot = tl.sum(term, ACROSS, keep_dims=True)
        if config.WIDE:  # grad is read again, from a cache: y takes the registers
            m = again(m, dot, space)
            keep = kept(mask, None, space, m, n, config, True)[0]
            g = fetch(grad, space, m, n, keep, True).to(C)
        if OP == NORMALIZE:
            dot = tl.where(counts, dot, 0.0)
        edge = within(space, m, n)
        store(out, space, m, n, gradient_tile(y, g, keep, dot, by, OP, C), edge, True)
    else:
        BO: tl.constexpr = config.BM if config.AXIS == INNER else config.BN
        BS: tl.constexpr = config.BS
        splits, pieces, rows = parts.splits, parts.pieces, parts.groups.to(I) * BO
        output = group * BO + tl.arange(0, BO).to(I)
        if config.SPLIT:
            many = pieces > BS
            start = split * parts.per_split
            end = tl.minimum(start + parts.per_split, pieces)
            if summing:
                dot_pieces(start, end, block, x, grad, mask, a, b, by, partial, output, rows, space, parts, config)
                if (count_summed(counter, group) == splits - 1) & many:
                    sums = add_partials(partial, pieces, output, rows, BS, BO)[0]
                    tl.debug_barrier()  # every thread has loaded the partials that are overwritten next
                    tl.store(partial + output, sums)
                    count_summed(counter, group)
            else:
                await_sums(counter, group, splits + many.to(tl.int32))
                summed = tl.where(many, 1, pieces)
                dot = tl.expand_dims(add_partials(partial, summed, output, rows, BS, BO)[0], ACROSS).to(C)
                if OP == NORMALIZE:
                    dot = tl.where(counts, dot, 0.0)
                first_tile, last_tile = written_tiles(start, end, parts)
                write_gradient(first_tile, last_tile, block, x, grad, mask, out, a, b, by, dot, space, config)
                count_written(counter, group, splits)
        else:
            zero = parts.tiles * 0
            dot_pieces(zero, pieces, block, x, grad, mask, a, b, by, partial, output, rows, space, parts, config)
            tl.debug_barrier()  # every thread has stored its part of the partials
            dot = tl.expand_dims(add_partials(partial, pieces, output, rows, BS, BO)[0], ACROSS).to(C)
            if OP == NORMALIZE:
                dot = tl.where(counts, dot, 0.0)
            write_gradient(zero, parts.written, block, x, grad, mask, out, a, b, by, dot, space, config)


ROWS_BACKWARD = declare(rows_backward_kernel)

"""triplet_margin_loss: max(|a - p| - |a - n| + margin, 0) for each row; with SWAP |p - n| for |a - n| where it is less.

A difference is x - y + eps, as in torch, but equal vectors are at distance 0. The state of a distance is (unit,
squares, differ): a power of two, the sum of (difference / unit)^2, and 1 if the vectors differ anywhere, else 0.
"""

import torch
import triton
import triton.language as tl

from ..engine.blocks import is_finished, load_partials
from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.math import rounded_product
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import declare, one_per_row, piece_of, split_of, tile_at
from ..engine.row_loss import add_up, reduction
from ..engine.row_plan import SUM, launch
from ..engine.scaling import power_below, reciprocal
from ..engine.tile import fetch, in_batch, store, within, within_lane


@triton.jit
def distance_tile(x, y, eps, edge, config):
    """The state of each row of a tile, in fp64: (BM, 1), or (1, BN) for rows across memory."""
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    d = x - y  # 0 outside the tensor, where both are 0
    most = tl.max(tl.abs(d), ACROSS, keep_dims=True)
    unit = power_below(most + tl.abs(eps))
    parts = tl.where(edge, d + eps, 0.0) * reciprocal(unit)
    # Each thread adds up in fp32, the threads' sums are added in fp64: the loss is a difference of two distances.
    # (Rows across memory have few elements in a tile, and no registers for fp64.) rounded_product: fp64 squares would
    # fuse with the addition of another thread's.
    if ACROSS == 1 and parts.dtype == tl.float32:
        squares = within_lane(parts * parts, config).to(tl.float64)
    else:
        squares = rounded_product(parts, parts)
    squares = tl.sum(squares, ACROSS, keep_dims=True).to(tl.float64)
    differ = (most > 0) | (squares != squares)  # the maximum ignores NaN
    return unit.to(tl.float64), squares, differ.to(tl.float64)


@triton.jit
def tile_states(x, y, z, block, t, eps, space, config):
    """The states of |a - p|, |a - n| and |p - n|; without SWAP the third is the second."""
    C: tl.constexpr = config.C
    m, n = tile_at(space, block, t, config)
    edge = within(space, m, n)
    a = fetch(x, space, m, n, edge, True).to(C)  # (BM, BN)
    p = fetch(y, space, m, n, edge, True).to(C)
    q = fetch(z, space, m, n, edge, True).to(C)
    near = distance_tile(a, p, eps, edge, config)
    far = distance_tile(a, q, eps, edge, config)
    apart = far
    if config.SWAP:
        apart = distance_tile(p, q, eps, edge, config)
    return near, far, apart


@triton.jit
def merge(a, b):
    unit, squares, differ = a
    new, more, other = b
    larger = tl.maximum(unit, new)
    unit, new = unit * reciprocal(larger), new * reciprocal(larger)
    return larger, squares * (unit * unit) + more * (new * new), tl.maximum(differ, other)


@triton.jit
def merge_partials(partial, size, pieces, output, rows, BS: tl.constexpr, BO: tl.constexpr, ACROSS: tl.constexpr):
    """Merges the states of all pieces, in order of piece, whichever block finished last."""
    state = empty_state(BO, ACROSS)
    for first in range(0, pieces, BS):
        unit, inside = load_partials(partial, pieces, first, output, rows, BS, ACROSS)
        squares = load_partials(partial + size, pieces, first, output, rows, BS, ACROSS)[0]
        differ = load_partials(partial + size * 2, pieces, first, output, rows, BS, ACROSS)[0]
        unit = tl.where(inside, unit, power_below(unit * 0))
        larger = tl.max(unit, ACROSS, keep_dims=True)
        by = unit * reciprocal(larger)
        squares = tl.sum(rounded_product(squares, by * by), ACROSS, keep_dims=True)
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


TripletConfig = constants("SWAP REDUCE EMPTY_NAN AXIS WHOLE BM BN BS LM LN VEC C I")


@triton.jit
def triplet_kernel(
    x: Operand, y: Operand, z: Operand, keep: Operand, loss: Operand, used: Operand, near: Operand, far: Operand,
    apart: Operand, partial: tl.pointer_type, counter: tl.pointer_type, margin: tl.float64, eps: tl.float64,
    space: Space, parts: Parts, config: TripletConfig,
):  # fmt: skip
    """Writes the loss of each row, and its distances; all 0 where a row is not kept. REDUCE: `loss` is the sum or mean
    of all rows, and `used` the divisor of a mean."""
    I: tl.constexpr = config.I
    SWAP: tl.constexpr = config.SWAP
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    BO: tl.constexpr = config.BM if config.AXIS == INNER else config.BN
    split, group, batch, block = split_of(parts, config)
    space = in_batch(space, batch, (x, y, z, keep, loss, used, near, far, apart))
    small = tl.full([1, 1], eps, config.C)
    finished = True
    if config.WHOLE:
        state, other, third = tile_states(x, y, z, block, 0, small, space, config)
    else:
        pieces, rows = parts.pieces, parts.groups.to(I) * BO
        size = pieces * rows
        output = group * BO + tl.arange(0, BO).to(I)
        for piece in range(split * parts.per_split, tl.minimum((split + 1) * parts.per_split, pieces)):
            state, other, third = empty_state(BO, ACROSS), empty_state(BO, ACROSS), empty_state(BO, ACROSS)
            start, end = piece_of(piece, parts)
            for t in range(start, end):
                a, b, c = tile_states(x, y, z, block, t, small, space, config)
                state, other, third = merge(state, a), merge(other, b), merge(third, c)
            pointer = partial + piece * rows + tl.expand_dims(output, ACROSS)
            for i in tl.static_range(3):
                tl.store(pointer + size * i, state[i])
                tl.store(pointer + size * (i + 3), other[i])
                if SWAP:
                    tl.store(pointer + size * (i + 6), third[i])
        finished = is_finished(counter + group, parts.splits)
    if finished:
        if not config.WHOLE:
            BS: tl.constexpr = config.BS * 2  # with fewer elements than threads, several threads would load each
            state = merge_partials(partial, size, pieces, output, rows, BS, BO, ACROSS)
            other = merge_partials(partial + size * 3, size, pieces, output, rows, BS, BO, ACROSS)
            third = other
            if SWAP:
                third = merge_partials(partial + size * 6, size, pieces, output, rows, BS, BO, ACROSS)
        to_positive, to_negative, between = distance(state), distance(other), distance(third)
        d = excess(to_positive, to_negative, between, margin, SWAP)
        value = tl.where(d <= 0, 0.0, d)  # max(|a - p| - |a - n| + margin, 0)
        m, n = tile_at(space, block, 0, config)
        inside = one_per_row(space, m, n, config)
        kept = inside
        if keep is not None:
            kept &= fetch(keep, space, m, n, inside, True) != 0
            value, to_positive = tl.where(kept, value, 0.0), tl.where(kept, to_positive, 0.0)
            to_negative, between = tl.where(kept, to_negative, 0.0), tl.where(kept, between, 0.0)
        if config.REDUCE:
            value = tl.where(inside, value, 0.0)
            if not config.WHOLE:
                partial += size * (9 if SWAP else 6)
                counter += tl.where(parts.splits > 1, parts.groups, 0)
            add_up(value, kept, value, loss, used, partial, counter, group, parts.groups, config, False)
        else:
            store(loss, space, m, n, value.to(config.C), inside, True)
        store(near, space, m, n, to_positive, inside, True)
        store(far, space, m, n, to_negative, inside, True)
        if SWAP:
            store(apart, space, m, n, between, inside, True)


TRIPLET = declare(triplet_kernel)


def each_row(*row_stats):
    return tuple(None if x is None or not x.numel() else x.unsqueeze(-1) for x in row_stats)


def prepare(anchor, positive, negative, keep, swap, mean=None, empty_nan=False):
    """Returns (results, arguments of row_plan.launch, its constants, its options). mean: True for the mean of all rows,
    False for their sum, None for each row's loss, without a second result."""
    rows, compute, device = anchor.shape[:-1], compute_dtype(anchor, positive, negative), anchor.device
    near, far, apart = (empty(shape, torch.float64, device) for shape in (rows, rows, rows if swap else (0,)))
    loss = empty(rows if mean is None else (), compute, device)
    used = None if mean is None else empty((), torch.float64, device)
    reduced = (None if t is None else t.expand(rows) for t in (loss, used))
    tensors = (anchor, positive, negative, *each_row(keep, *reduced, near, far, apart))
    plan = TRIPLET, tensors, (3, 4, 5, 6, 7, 8), anchor.shape, anchor.dim() - 1, compute
    constants = {"SWAP": swap} | reduction(mean, empty_nan)
    return (loss, used, near, far, apart), plan, constants, {"phases": SUM, "partials": 9 if swap else 6}


def triplet_margin_loss_reduced(
    anchor, positive, negative, keep, margin=1.0, p=2.0, eps=1e-6, swap=False, mean=None, empty_nan=False
):
    """Returns (loss, what a mean divides by or None, three distances). There must be a row for a mean or sum."""
    if p != 2:
        raise ValueError(f"_triplet_margin_loss: the kernel has p = 2 alone, got {p}")
    results, plan, constants, options = prepare(anchor, positive, negative, keep, swap, mean, empty_nan)
    if results[2].numel():
        launch("triplet_margin_loss", *plan, (margin, eps), constants, **options)
    return results


def triplet_margin_loss(*operands):
    loss, _, *distances = triplet_margin_loss_reduced(*operands)
    return loss, *distances

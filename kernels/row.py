"""How an op of rows is cut up, from sizes alone, and launched."""

from dataclasses import replace

import torch
import triton.language as tl

from . import reduce as reducing
from .indexing import broadcast_strides, needs_int64, power_of_2, sparse_kinds, tile_kinds, tile_shape
from .launch import COMPUTE, Plan, cached_plan, check_operands, trait
from .reduction import FLUSH, INNER

ON_CHIP = 16384  # elements of a tile: 32 for each of 512 threads
NEAR = 64  # bytes of neighbouring rows that a tile takes at least, where rows lie across memory
MOST_THREADS = 512
PER_THREAD = 32


def at_least(n):
    """The smallest power of two that is at least n."""
    return power_of_2(2 * max(n, 1) - 1)


def whole_tile(axis, M, N, vec, tile, itemsize):
    """(BM, BN) with whole rows, or None where they are too long."""
    if axis is INNER:
        columns = max(at_least(N), vec)
        if columns > ON_CHIP:
            return None
        return min(max(tile // columns, 1), at_least(M)), columns
    rows = at_least(M)
    columns = max(min(max(tile // rows, NEAR // itemsize), at_least(N)), vec)
    return (rows, columns) if rows * columns <= ON_CHIP else None


def plan(kernel, tensors, per_row, shape, dim, compute, constants=None, arch=None, policy=None):
    """tensors: the operands, of which `per_row` have one number a row; rows lie along `dim`."""
    policy = policy or reducing.POLICY
    strides = [None if t is None else broadcast_strides(t, shape) for t in tensors]
    reduced = [d == dim for d in range(len(shape))]
    axis, outer, inner, _ = reducing.groups(shape, strides, reduced)
    outer, inner = outer.first(len(tensors)), inner.first(len(tensors))
    dense = [None if i in per_row else t for i, t in enumerate(tensors)]
    kinds, vec = tile_kinds(dense, *(g._replace(strides=hide(dense, g.strides)) for g in (outer, inner)))
    kinds = sparse_kinds(kinds, outer, inner, per_row)
    M, N = outer.numel, inner.numel
    config = kernel.config(arch)
    itemsize = min(t.element_size() for t in dense if t is not None and t.dtype.is_floating_point)
    tile = config.tile(itemsize, vec)
    whole = whole_tile(axis, M, N, vec, tile, itemsize)
    BM, BN = whole or tile_shape(M, N, vec, tile, policy.widest if axis is INNER else policy.widest_kept)
    while config.threads < min(MOST_THREADS, BM * BN // PER_THREAD):
        config = replace(config, threads=config.threads * 2)
    fold, group = reducing.fold_of(axis, BM, BN, vec, config.threads)
    down, across = -(-M // BM), -(-N // BN)
    tiles, blocks = (across, down) if axis is INNER else (down, across)
    wide = needs_int64(outer, inner)
    values = {
        "M": M,
        "N": N,
        "tiles": tiles,
        "AXIS": axis.value,
        "WHOLE": whole is not None,
        "LONG": whole is None and tiles > FLUSH.value,
        "BM": BM,
        "BN": BN,
        "FOLD": fold,
        "GROUP": group,
        "VEC": vec,
        "C": COMPUTE[compute],
        "I": tl.int64 if wide else tl.int32,
    }
    made = Plan(kernel, tensors, {}, outer, inner, kinds, vec, values | (constants or {}),
                grid=(blocks, 1), wide=wide, arch=arch)  # fmt: skip
    made.config = config
    return made


def hide(dense, strides):
    return tuple(None if t is None else s for t, s in zip(dense, strides))


def launch(name, kernel, tensors, per_row, shape, dim, compute, eps=0.0, constants=None, arch=None):
    """tensors in the order of the kernel's operands, outputs too; shape: what they broadcast to."""
    given = [t for t in tensors if t is not None]
    check_operands(name, *given)
    device = given[0].device
    key = (kernel.fn, *map(trait, tensors), shape, dim, compute, *(constants or {}).items(), device, reducing.POLICY)
    made = cached_plan(
        key, lambda: plan(kernel, tensors, per_row, shape, dim, compute, constants, arch)
    )  # fmt: skip
    if made.grid[0]:
        made(device, *tensors, float(eps))


def floor(eps, compute):
    """eps, or the smallest normal number of the compute dtype."""
    return torch.finfo(compute).tiny if eps is None else eps


def thin(shape, dim):
    return tuple(1 if d == dim else size for d, size in enumerate(shape))


def computed_in(*tensors):
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32

"""How a reduction is cut up, from sizes alone, and launched."""

from typing import NamedTuple

import torch
import triton.language as tl

from .indexing import broadcast_strides, fuse, memory_order, needs_int64, split_inner, tile_kinds, tile_shape
from .launch import COMPUTE, COUNTERS, Plan, arch_of, cached_plan, check_operands, split_counters, trait
from .reduction import (
    ALL,
    BY_COUNT,
    BY_NUMBER,
    BY_TENSOR,
    COLUMNS,
    FLUSH,
    INNER,
    OUTER,
    REDUCE,
    ROWS,
    VECTORS,
)


class Policy(NamedTuple):
    blocks: int = 4096  # to aim for when an output block is split: many waves even on the largest GPU
    most_splits: int = 16384
    widest: int = 1024  # columns of a tile with more than one row
    widest_kept: int = 256  # columns of a tile whose columns are outputs: more blocks of outputs
    partials: int = 1024  # that the last block adds at a time


POLICY = Policy()


def groups(shape, strides, reduced):
    """(AXIS, outer group, inner group, outputs) for operands with these strides, the output the last of them."""
    outputs = 1
    out_strides = [0] * len(shape)
    for d in reversed(range(len(shape))):
        if not reduced[d]:
            out_strides[d] = outputs
            outputs *= shape[d]
    order = memory_order(shape, strides)
    strides = [*strides, out_strides]
    if outputs == 1:
        outer, inner = split_inner(fuse(order, shape, strides))
        return (
            INNER if outer.numel == 1 else ALL,
            outer,
            inner,
            1,
        )  # one row needs no division to find its tiles
    near = bool(order) and reduced[order[-1]]
    outer = fuse([d for d in order if reduced[d] != near], shape, strides)
    inner = fuse([d for d in order if reduced[d] == near], shape, strides)
    return INNER if near else OUTER, outer, inner, outputs


def split_tiles(tiles, blocks, policy):
    """(splits, tiles of each split) of each of `blocks` output blocks."""
    if tiles <= 1 or blocks >= COUNTERS:
        return 1, max(tiles, 1)
    flush = FLUSH.value
    per_split = min(-(-tiles * blocks // policy.blocks), flush)
    if tiles > per_split * policy.most_splits:
        per_split = -(-tiles // (flush * policy.most_splits)) * flush
    return -(-tiles // per_split), per_split


def fold_of(axis, BM, BN, vec, threads):
    """(FOLD, GROUP): which elements of a tile one thread holds. Threads take `vec` columns each, row after row."""
    rows = min(BM, max(threads * vec // BN, 1))  # that all threads together take at once
    if axis is OUTER or axis is ALL and vec == 1 and rows > 1:
        return ROWS.value, rows
    return (VECTORS.value, vec) if vec > 1 else (COLUMNS.value, min(BN, threads))


class Cut(NamedTuple):
    """How a reduction is spread over tiles, blocks and splits. values: the arguments every such kernel takes."""

    outer: object
    inner: object
    kinds: list
    vec: int
    values: dict
    grid: tuple
    wide: bool  # 64-bit indices
    workspace: int  # numbers that the splits leave for the last block


def cut(kernel, tensors, data, shape, reduced, arrays, arch=None, policy=None, at_once=1):
    """tensors: the operands, the first `data` of which set the size of a tile; reduced: a bool per dimension; arrays:
    the partial results that a split leaves for each output; at_once: of which the last block holds so many."""
    policy = policy or POLICY
    strides = [None if t is None else broadcast_strides(t, shape) for t in tensors]
    axis, outer, inner, outputs = groups(shape, strides, reduced)
    out_strides = (inner if axis is OUTER else outer).strides[-1]
    outer, inner = outer.first(len(tensors)), inner.first(len(tensors))
    kinds, vec = tile_kinds(tensors, outer, inner)
    config = kernel.config(arch)
    M, N = outer.numel, inner.numel
    sizes = [None if t is None else t.element_size() for t in tensors]
    narrowest = min(filter(None, sizes[:data]), default=0) or min(filter(None, sizes))
    widest = policy.widest_kept if axis is OUTER else policy.widest
    BM, BN = tile_shape(M, N, vec, config.tile(narrowest, vec), widest)
    fold, group = fold_of(axis, BM, BN, vec, config.threads)
    down, across = -(-M // BM), -(-N // BN)
    tiles, blocks, BO = {0: (down, across, BN), 1: (across, down, BM), 2: (down * across, 1, 1)}[axis.value]
    splits, per_split = split_tiles(tiles, blocks, policy)
    wide = needs_int64(outer, inner, arrays * splits * outputs)
    values = {
        "out_strides": out_strides,
        "M": M,
        "N": N,
        "tiles": tiles,
        "splits": splits,
        "per_split": per_split,
        "outputs": outputs,
        "AXIS": axis.value,
        "SPLIT": splits > 1,
        "LONG": per_split > FLUSH.value,
        "BM": BM,
        "BN": BN,
        "BS": max(policy.partials // at_once // BO, 1),
        "FOLD": fold,
        "GROUP": group,
        "VEC": vec,
        "I": tl.int64 if wide else tl.int32,
    }
    workspace = arrays * splits * outputs if splits > 1 else 0
    return Cut(outer, inner, kinds, vec, values, (blocks, splits), wide, workspace)


def plan(term, tensors, shape, reduced, dtype, compute, mean, divisor, empty_nan, arch=None, policy=None):
    """tensors: x, y, mask, weight; reduced: a bool per dimension; divisor: (DIVISOR, dtype of the tensor)."""
    arrays = 1 + (tensors[2] is not None or tensors[3] is not None) + (tensors[3] is not None)
    made = cut(REDUCE, tensors, 2, shape, reduced, arrays, arch, policy)
    M, N = made.outer.numel, made.inner.numel
    values = made.values | {
        "TERM": term,
        "MEAN": mean,
        "DIVISOR": divisor[0],
        "EMPTY_NAN": empty_nan,
        "C": COMPUTE[compute],
        "reduced": {0: M, 1: N, 2: M * N}[made.values["AXIS"]],
    }
    dtypes = {"denominator": divisor[1], "out": dtype, "used": torch.float64} | scratch(made.values)
    planned = Plan(REDUCE, tensors, dtypes, made.outer, made.inner, made.kinds, made.vec, values,
                   grid=made.grid, wide=made.wide, arch=arch)  # fmt: skip
    planned.workspace = made.workspace
    return planned


def scratch(values):
    """dtypes of what only split blocks need."""
    split = values["SPLIT"]
    return {"partial": torch.float64 if split else None, "counter": torch.int32 if split else None}


def workspace(plan, device):
    """(partial, counter) of one launch."""
    if not plan.workspace:
        return None, None
    return torch.empty(plan.workspace, dtype=torch.float64, device=device), split_counters(device)


def reduced_dims(shape, dim):
    """A bool per dimension; None or () reduces all."""
    dims = {d % max(len(shape), 1) for d in dim or ()} or set(range(len(shape)))
    return [d in dims for d in range(len(shape))]


def reduced_shape(shape, reduced, keepdim):
    return tuple(1 if gone else size for size, gone in zip(shape, reduced) if keepdim or not gone)


def reduce(name, term, x, y, mask, weight, denominator, divisor, dim, keepdim, mean, p0, p1, empty_nan, dtype):
    """(value, divisor) of the sum or mean over `dim` (None or (): all) of keep ? w * term(x - y) : 0."""
    if dtype is None:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    tensors = x, y, mask, weight
    check_operands(name, *tensors, denominator)
    dim = tuple(dim) if dim else ()
    given = None if denominator is None else denominator.dtype
    key = (
        term,
        *map(trait, tensors),
        given,
        divisor is None,
        dim,
        keepdim,
        mean,
        empty_nan,
        dtype,
        x.device,
        POLICY,
    )

    def build():
        shape = x.shape if y is None else torch.broadcast_shapes(x.shape, y.shape)
        reduced = reduced_dims(shape, dim)
        wide = torch.float64 in (dtype, *(t.dtype for t in (x, y, weight) if t is not None))
        compute = torch.float64 if wide else torch.float32
        by = BY_TENSOR if given else BY_COUNT if divisor is None else BY_NUMBER
        made = plan(
            term,
            tensors,
            shape,
            reduced,
            dtype,
            compute,
            mean,
            (by.value, given),
            empty_nan,
            arch_of(x.device),
        )
        made.out_shape = reduced_shape(shape, reduced, keepdim)
        return made

    made = cached_plan(key, build)
    out = torch.empty(made.out_shape, dtype=dtype, device=x.device)
    used = torch.empty(made.out_shape, dtype=torch.float64, device=x.device)
    if out.numel():
        partial, counter = workspace(made, x.device)
        number = 1.0 if divisor is None else float(divisor)
        made(x.device, *tensors, denominator, out, used, partial, counter, number, float(p0), float(p1))
    return out, used

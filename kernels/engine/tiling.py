"""How a reduction is cut into tiles, blocks and splits, from sizes alone."""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton.language as tl

from .buffers import COUNTERS, empty, split_buffers, split_counters
from .indexing import (
    ALL,
    INNER,
    OUTER,
    Group,
    broadcast_strides,
    fuse,
    line,
    memory_order,
    needs_int64,
    shared_kinds,
    split_inner,
    tile_kinds,
    tile_shape,
)
from .launch import Plan

WARP = 32
FLUSH = tl.constexpr(16)  # the most tiles a lane adds up in fp32; their sum is then added in fp64


class Policy(NamedTuple):
    blocks: int = 4096  # to aim for if output blocks are split: many waves even on the largest GPU
    most_splits: int = 16384
    widest: int = 1024  # columns of a tile with more than one row
    widest_kept: int = 64  # columns of a tile whose columns are outputs: many blocks, and few splits of each to gather
    partials: int = 1024  # partials that the last block adds at a time


POLICY = Policy()


def groups(shape, strides, reduced):
    """Returns (AXIS, outer group, inner group, number of outputs). The groups have these strides, then the output's."""
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
        return (INNER if outer.numel == 1 else ALL), outer, inner, 1  # one row needs no division to find its tiles
    near = bool(order) and reduced[order[-1]]
    outer = fuse([d for d in order if reduced[d] != near], shape, strides)
    inner = fuse([d for d in order if reduced[d] == near], shape, strides)
    return INNER if near else OUTER, outer, inner, outputs


def split_tiles(tiles, blocks, policy):
    """Returns (splits of each output block, tiles of each split), for `blocks` output blocks of `tiles` tiles."""
    if tiles <= 1 or blocks >= COUNTERS:
        return 1, max(tiles, 1)
    flush = FLUSH.value
    per_split = min(-(-tiles * blocks // policy.blocks), flush)
    if tiles > per_split * policy.most_splits:
        per_split = -(-tiles // (flush * policy.most_splits)) * flush
    return -(-tiles // per_split), per_split


def lanes_of(axis, BM, BN, vec, threads):
    """Returns (LM, LN), a tile's lanes down and across. A lane is what one thread holds of one output, and adds up
    without moving data (tile.by_lane). Threads take `vec` columns each, row after row, or fewer in a small tile."""
    across = min(BN // min(vec, max(BM * BN // threads, 1)), threads)
    return (BM if axis is INNER else min(BM, threads // across)), (BN if axis is OUTER else across)


class Cut(NamedTuple):
    """How a reduction is spread over tiles, blocks and splits. values: arguments that every such kernel takes."""

    config: object
    outer: object
    inner: object
    batch: object  # None: no batch
    kinds: list
    vec: int
    values: dict
    grid: tuple
    wide: bool  # 64-bit indices
    workspace: int  # size in fp64 numbers of what the splits store for the last block

    def with_shared(self, which):
        """The cut in which the operands at the indices `which`, shared by many rows, are read once for a tile."""
        return self._replace(kinds=shared_kinds(self.kinds, self.outer, self.inner, which))

    def plan(self, kernel, tensors, dtypes, values, arch):
        """The kernel's plan with this cut. dtypes, values: of the kernel's own pointers and arguments, by name."""
        dtypes = dtypes | scratch(self.values["SPLIT"])
        plan = Plan(kernel, tensors, dtypes, self.outer, self.inner, self.kinds, self.vec, self.values | values,
                    grid=self.grid, wide=self.wide, arch=arch, batch=self.batch)  # fmt: skip
        plan.config, plan.workspace = self.config, self.workspace
        plan.counters = self.grid[0] if self.values["SPLIT"] else 0
        return plan


def cut(kernel, tensors, data, shape, reduced, arrays, arch=None, policy=None, at_once=1, batched=False, tile_of=None,
        narrow=False):  # fmt: skip
    """The Cut of a reduction. tensors: the operands; the first `data` of them set the size of a tile. reduced: a bool
    per dimension. arrays: how many partial results a split stores for each output. at_once: divides how many partials
    the last block loads at a time. batched: the first dimension is in neither group, and a block has one index of it.
    tile_of(axis, M, N, vec, elements): (BM, BN), in place of `tile_shape`. narrow: registers allow a larger tile."""
    policy = policy or POLICY
    lined = line(tensors, shape) if all(reduced) and not batched else None
    if lined:
        axis, (outer, inner), outputs, out_strides = INNER, lined, 1, (0,)
        batch, steps = 1, outer.strides
    else:
        strides = [None if t is None else broadcast_strides(t, shape) for t in tensors]
        batch, steps = 1, [None if s is None else (0,) for s in strides]
        if batched:
            batch, shape, reduced = shape[0], shape[1:], reduced[1:]
            # (a batch of one gets stride 0: its own may be anything)
            steps, strides = [s and (s[0] * (batch > 1),) for s in strides], [s and s[1:] for s in strides]
        axis, outer, inner, outputs = groups(shape, strides, reduced)
        out_strides = (inner if axis is OUTER else outer).strides[-1]
        outer, inner = outer.first(len(tensors)), inner.first(len(tensors))
    outside = Group((batch, *outer.shape), tuple(s and (*b, *s) for b, s in zip(steps, outer.strides)))
    kinds, vec = tile_kinds(tensors, outside, inner)
    config = kernel.config(arch)
    M, N = outer.numel, inner.numel
    # A tile twice as large has twice the bytes in flight, if there are elements for it.
    times = 2 if narrow and vec > 1 and M * N >= POLICY.blocks * config.tile_bytes else 1
    if axis is INNER and vec > 1 and N > WARP * vec and M * times >= 4 * POLICY.blocks and not batched:
        # One warp per row, for many rows: its lanes' states are merged in few steps and without a barrier.
        threads = min(WARP, config.threads)
        config = replace(config, threads=threads, tile_bytes=config.tile_bytes * times * threads // config.threads)
    elif axis is OUTER:
        config = replace(config, tile_bytes=config.tile_bytes * times)
    sizes = [None if t is None else t.element_size() for t in tensors]
    narrowest = min(filter(None, sizes[:data]), default=0) or min(filter(None, sizes))
    widest = policy.widest_kept if axis is OUTER else policy.widest
    elements = config.tile(narrowest, vec, () if tile_of else tensors)  # (tile_of knows what its tile holds)
    BM, BN = tile_of(axis, M, N, vec, elements) if tile_of else tile_shape(M, N, vec, elements, widest)
    LM, LN = lanes_of(axis, BM, BN, vec, config.threads)
    down, across = -(-M // BM), -(-N // BN)
    by_axis = {OUTER.value: (down, across, BN), INNER.value: (across, down, BM), ALL.value: (down * across, 1, 1)}
    tiles, blocks, BO = by_axis[axis.value]
    blocks, outputs = batch * blocks, batch * outputs
    aim = policy.blocks // (2 if axis is OUTER else 1)  # (OUTER has a lane per column: slow to merge)
    splits, per_split = split_tiles(tiles, blocks, policy._replace(blocks=aim))
    wide = needs_int64(outside, inner, arrays * splits * outputs)
    values = {
        "out_strides": None if batched else out_strides,
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
        "LM": LM,
        "LN": LN,
        "VEC": vec,
        "I": tl.int64 if wide else tl.int32,
    }
    workspace = arrays * splits * outputs if splits > 1 else 0
    outside = Group((batch,), tuple(steps)) if batched else None
    return Cut(config, outer, inner, outside, kinds, vec, values, (blocks, splits), wide, workspace)


def scratch(split):
    """dtypes of the pointers that only split blocks need."""
    return {"partial": torch.float64 if split else None, "counter": torch.int32 if split else None}


def workspace(plan, device):
    """Returns (partial, counter) for one launch: the stream's buffers, or new ones."""
    if not plan.workspace:
        return None, None
    kept = None if plan.index is None else split_buffers(plan.index, device)
    partial, counter = kept or (None, split_counters(device))
    if partial is None or plan.apart:
        partial = empty((plan.workspace,), torch.float64, device)
    return partial, counter


def reduced_dims(shape, dim):
    """A bool per dimension; None or () reduces all."""
    dims = {d % max(len(shape), 1) for d in dim or ()} or set(range(len(shape)))
    return [d in dims for d in range(len(shape))]


def restore_dims(tensor, reduced):
    """The tensor, with each reduced dimension put back with size 1."""
    for d, gone in enumerate(reduced):
        tensor = tensor.unsqueeze(d) if gone else tensor
    return tensor


def reduced_shape(shape, reduced, keepdim):
    return tuple(1 if gone else size for size, gone in zip(shape, reduced) if keepdim or not gone)

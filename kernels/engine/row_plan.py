"""How rows are cut into tiles, blocks and splits, from sizes alone, and how their kernels are launched."""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton.language as tl

from ..engine import tiling
from .buffers import COUNTERS
from .indexing import (
    INNER,
    OUTER,
    ROW,
    SCALAR,
    Group,
    at_least,
    broadcast_strides,
    needs_int64,
    peeled_kinds,
    power_of_2,
    sparse_kinds,
    split_inner,
    tile_kinds,
)
from .kernel import COMPUTE
from .launch import Plan, cached_plan
from .tensors import check_operands, traits

MOST_THREADS = 512
WIDE = 1024  # threads of a block that has one row, and a multiprocessor to itself
WIDE_BYTES = 4  # bytes read per element of such a row, at most: else registers do not hold it
REGISTERS = 65536  # registers of a block, at most
# Bytes of a tile in the compute dtype that a thread holds; half of it if single accesses need registers for addresses.
PER_THREAD = 128
NEAR = 32  # bytes of neighbouring rows that a tile takes at least, where rows lie across memory
FEWEST = 16  # the fewest elements of the nearest dimension that make the inner group by themselves
# phases. MAP: results depend on their own tile alone. SUM: one result a row. SUM_AND_WRITE: results depend on the whole
# row. PICK: one result a row, from one element of it. ALONE: one result a row, by one block that has the whole row.
MAP, SUM, SUM_AND_WRITE, PICK, ALONE = range(5)
UNSHARED = MAP, PICK, ALONE  # several blocks never share a row: none gathers partial results
FEWEST_TILES = 3  # tiles of a piece of a row, at least
PIECES = 128  # pieces of a row, at most, until a piece has FLUSH tiles, which fp32 adds up
BUNDLES = tl.constexpr(512)  # bundles of blocks, at most, where all rows are reduced
BUNDLE = tl.constexpr(256)  # blocks per bundle, at least; so many parts are loaded together
AT_ONCE = 8  # divides how many parts the gathering block loads at a time: a part has several numbers


class Tile(NamedTuple):
    rows: int  # BM
    columns: int  # BN
    vec: int
    threads: int


def whole_along(N, vec, tile, per_thread, threads, most):
    """A tile of whole rows along memory. A row that takes a warp more than one access gets as few warps as can hold it:
    one warp sums its row in few steps, without a barrier. Few rows have the tile of many, so that a row's sum does not
    depend on their number."""
    columns = max(at_least(N, 2 * most * per_thread), vec)
    if vec > 1 and columns > tiling.WARP * vec:
        threads = min(max(columns // per_thread, tiling.WARP), most)
        tile = threads * per_thread
    return Tile(max(tile // columns, 1), columns, vec, threads)


def whole_across(M, N, vec, tile, per_thread, threads, itemsize):
    """A tile of whole rows across memory. Each lane of a warp takes VEC neighbouring rows, and as many elements of each
    as a thread may hold; several warps share only rows that have more. Arithmetic per row is repeated in every thread
    that has a part of the row."""
    rows, fewest = at_least(M, 2 * MOST_THREADS * per_thread), NEAR // itemsize
    if vec > 1:
        vec = min(vec, max(4 // itemsize, per_thread // rows, 2))
        fewest = max(min(tiling.WARP * vec, threads * per_thread // rows), fewest)
        tile = rows * fewest
        threads = max(tile // per_thread, tiling.WARP)
    return Tile(rows, max(at_least(N, max(tile // rows, fewest)), vec), vec, threads)


def is_wide(N, per_thread, x, dense):
    """True if a row just fits the registers of a multiprocessor and fills most of a tile: it is read once then. dense:
    the operands that are read, and the result, which has the dtype of x."""
    held = sum(t.element_size() for t in dense if t is not None and t.dtype.is_floating_point) - x.element_size()
    fits = 3 * WIDE * per_thread < 4 * N <= 4 * WIDE * per_thread
    return fits and held <= WIDE_BYTES


def part_along(N, vec, tile, threads):
    """A tile for rows along memory that are read in parts: few rows per tile, to have enough blocks."""
    columns = max(at_least(N, tile), vec)
    return Tile(max(tile // columns, 1), columns, vec, threads)


def part_across(M, N, vec, per_thread, threads, itemsize):
    """A tile for rows across memory that are read in parts: each thread takes VEC rows, and few elements of each."""
    vec = min(vec, max(4 // itemsize, 2))
    columns = max(at_least(N, threads * vec), vec)
    return Tile(at_least(M, max(per_thread // (2 * vec), threads // columns, 1)), columns, vec, threads)


def grouped(shape, strides, dim):
    """Returns (AXIS, batch, outer, inner): the groups of tiling.groups, and the batch, the dimensions of neither."""
    axis, outer, inner, _ = tiling.groups(shape, strides, [d == dim for d in range(len(shape))])
    batch, near = split_inner(inner)
    if axis is INNER or near.numel < FEWEST:
        return axis, Group((1,), tuple(s and (0,) for s in inner.strides)), outer, inner
    return axis, batch, outer, near


def pieces_of(tiles, axis):
    """Returns (pieces, tiles of each). A row that is read in parts is summed in pieces, and their results are merged in
    one order, whether a block has all pieces or one. The row's length alone decides, so that its bits do not depend on
    how many rows there are. Across memory a piece has the most tiles: a tile has few elements of a row."""
    most = tiling.FLUSH.value
    per_piece = most if axis is OUTER else min(FEWEST_TILES + tiles // PIECES, most)
    return -(-tiles // per_piece), per_piece


def counters_of(groups, split, phases, reduces):
    """How many counters a launch has. If rows are split: one per group of rows, or those of the tickets. Behind them,
    if all rows are reduced: one per bundle of blocks, and one for the bundles (row_loss.add_up)."""
    counters = 0
    if split:
        counters = 1 + 2 * groups if phases == SUM_AND_WRITE else groups
    if reduces:
        counters += 1 + -(-groups // max(BUNDLE.value, -(-groups // BUNDLES.value)))
    return counters


def split_rows(pieces, groups, phases, per_row_math, reduces):
    """Returns (splits, pieces of each). Rows that are read in parts and too few to fill a GPU are spread over several
    blocks. With per_row_math they are spread over fewer: a block's work beside its tiles takes as long as two tiles."""
    if pieces <= 1 or counters_of(groups, True, phases, reduces) > COUNTERS:
        return 1, pieces
    blocks = tiling.POLICY.blocks // phases // (4 if per_row_math else 1)
    splits = -(-pieces // max(pieces * groups // blocks, 1))
    return splits, -(-pieces // splits)


def plan(
    kernel, tensors, per_row, shape, dim, compute, constants=None, arch=None, *, phases=SUM_AND_WRITE, partials=0,
    per_row_math=False, held=1, registers=(None, None),
):  # fmt: skip
    """tensors: the operands. per_row: the indices of those with one number per row. Rows lie along `dim`. phases: what
    is done with a row (MAP, ...). partials: how many numbers each part of a row stores for the whole row. per_row_math:
    much is computed for each row beside its elements. Rows across memory are then read in parts, so that a row has one
    thread, and tiles hold no more than a thread may. held: the number of operands whose elements a thread holds
    together. registers: limits for the vector variant of (rows along memory, rows across it), against spills."""
    strides = [None if t is None else broadcast_strides(t, shape) for t in tensors]
    axis, batch, outer, inner = (g.first(len(tensors)) if i else g for i, g in enumerate(grouped(shape, strides, dim)))
    dense = [None if i in per_row else t for i, t in enumerate(tensors)]
    outside = Group(batch.shape + outer.shape, tuple(b and b + o for b, o in zip(batch.strides, outer.strides)))
    shared = [i for i, name in enumerate(kernel.operands) if name == "weight"]  # class weights: all rows share them
    kinds, vec = tile_kinds(dense, outside.without(per_row), inner.without(per_row), True, shared)
    M, N = outer.numel, inner.numel
    config = kernel.config(arch)
    per_thread = PER_THREAD * 8 // torch.finfo(compute).bits // held
    peel = False
    # (rows that fit one tile are not PEELED: half of the tile would lie beside them, and all elements need bounds)
    if vec == 1 and axis is INNER and "PEEL" in kernel.constants and N > MOST_THREADS * per_thread // 2:
        lead = kernel.operands.index("dx" if tensors[0] is None else "x")
        result, width = peeled_kinds(dense, outside.without(per_row), inner.without(per_row), lead, shared)
        if width > 1:
            kinds, vec, peel = result, width, True
    kinds = sparse_kinds(kinds, outer, inner, per_row)
    if M == 1:  # one row gets the kinds of several rows
        kinds = [ROW if kind is SCALAR else kind for kind in kinds]
    reach = N + vec - 1 if peel else N  # columns of all tiles when rows are written
    numbers = [t for i, t in enumerate(dense) if t is not None and t.dtype.is_floating_point and i not in shared]
    itemsize = min(t.element_size() for t in numbers)
    tile = config.tile(itemsize, vec, dense)
    per_thread = max(per_thread // (1 if vec > 1 else 2), 1)
    if per_row_math:
        tile = min(tile, config.threads * per_thread)
    apart = peel or phases == MAP or per_row_math and axis is OUTER
    may_be_wide = "WIDE" in kernel.constants and axis is INNER and vec > 1 and compute == torch.float32
    most_registers = registers[axis is not INNER] or config.max_registers[0]
    limit = config.max_registers[1] if vec == 1 else most_registers
    most = min(MOST_THREADS, power_of_2(REGISTERS // (limit or 1)))
    if may_be_wide and is_wide(N, per_thread, tensors[0], dense):
        most = WIDE
    if axis is INNER:
        result = whole_along(N, vec, tile, per_thread, config.threads, most)
    else:
        result = whole_across(M, N, vec, tile, per_thread, config.threads, itemsize)
    whole = not apart and result.rows * result.columns <= most * per_thread
    if not whole and axis is INNER:
        result = part_along(N, vec, tile, config.threads)
    elif not whole:
        result = part_across(M, N, vec, per_thread, config.threads, itemsize)
    BM, BN, vec, threads = result
    if phases == PICK:
        most = at_least(M if axis is INNER else N, config.threads)
        BM, BN = (most, 1) if axis is INNER else (1, most)
    # No two warps hold the same elements: an H100 gave a wrong loss of 4 x 32 doubles that eight warps held.
    threads = max(min(max(threads, BM * BN // per_thread), most, BM * BN), tiling.WARP)
    config = replace(config, threads=threads)
    LM, LN = tiling.lanes_of(axis, BM, BN, vec, threads)
    down, across, written = -(-M // BM), -(-N // BN), -(-reach // BN)
    tiles, blocks = (across, down) if axis is INNER else (down, across)
    written = max(tiles, written) if axis is INNER else tiles
    if phases == MAP:
        tiles = written
    groups = batch.numel * blocks
    reduces = (constants or {}).get("REDUCE")
    pieces, per_piece = (1, tiles) if phases in UNSHARED else pieces_of(tiles, axis)
    splits, per_split = split_rows(pieces, groups, phases, per_row_math, reduces)
    outputs = groups * (BM if axis is INNER else BN)
    leaves = phases not in UNSHARED and (pieces > 1 if "PIECES" in kernel.constants else not whole)
    workspace = (partials * pieces * outputs if leaves else 0) + (3 * (groups + BUNDLES.value) if reduces else 0)
    widest = max(t.element_size() for t in dense if t is not None)
    wide = needs_int64(outside, inner, workspace, reach * widest // 4 if peel else 0)  # (unaligned.py counts words)
    values = {
        "M": M,
        "N": N,
        "tiles": tiles,
        "written": written,
        "across": blocks,
        "groups": groups,
        "splits": splits,
        "per_split": per_split,
        "pieces": pieces,
        "per_piece": per_piece,
        "PEEL": peel,
        "AXIS": axis.value,
        "WHOLE": whole,
        "WIDE": whole and most == WIDE,
        "SPLIT": splits > 1,
        "PIECES": pieces > 1,
        "BM": BM,
        "BN": BN,
        "BS": max(tiling.POLICY.partials // AT_ONCE // (outputs // groups), 1),
        "LM": LM,
        "LN": LN,
        "VEC": vec,
        "C": COMPUTE[compute],
        "I": tl.int64 if wide else tl.int32,
    }
    values |= constants or {}
    plan = Plan(kernel, tensors, tiling.scratch(leaves or reduces), outer, inner, kinds, vec, values,
                grid=(groups * (tiles if phases == MAP else splits * (phases if splits > 1 else 1)), 1),
                wide=wide, arch=arch, batch=batch)  # fmt: skip
    if peel:  # unaligned reads take registers; 64 at most for four blocks to a multiprocessor
        most_registers = max(most_registers, 112) if most_registers else 64 if phases == SUM_AND_WRITE else None
    if most_registers:
        config = replace(config, max_registers=(most_registers, config.max_registers[1]))
    plan.config, plan.workspace = config, workspace
    plan.counters = counters_of(groups, splits > 1, phases, reduces)
    return plan


def exists(tensor):
    return tensor is not None


def launch(name, kernel, tensors, per_row, shape, dim, compute, floats=(0.0,), constants=None, **options):
    """Launches a kernel of rows. tensors: its operands, outputs included, in order. shape: the shape that they
    broadcast to. floats, constants: the kernel's own arguments. options: keyword arguments of `plan`."""
    result, addresses = traits(tensors)
    device = next(filter(exists, tensors)).device
    key = id(kernel), result, shape, dim, compute, constants and tuple(constants.items()), tiling.POLICY

    def build(arch):
        check_operands(name, *filter(exists, tensors))
        return plan(kernel, tensors, per_row, shape, dim, compute, constants, arch, **options)

    launch_plan = cached_plan(key, build, device)
    if launch_plan.grid[0]:
        launch_plan((*tensors, *tiling.workspace(launch_plan, device)), addresses, *map(float, floats))


def floor(eps, compute):
    """eps, or the smallest normal number of the compute dtype."""
    return torch.finfo(compute).tiny if eps is None else eps


def with_one_per_row(shape, dim):
    """The shape with one number a row: size 1 along `dim`."""
    return (*shape[:dim], 1, *shape[dim + 1 :]) if shape else shape

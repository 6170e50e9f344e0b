"""segment_sum, segment_mean, segment_max: reductions of the rows of each sequence.

A sequence is cut into chunks of equally many rows, counted from its first row. The chunks' results are merged in a
fixed order: the bits depend neither on the sequence's place nor on the other sequences. Where there are few sequences,
several blocks share the chunks of one, and the last of them to finish merges them.

    a chunk's result: (total, count, weights), or for a maximum (largest, how many equal it, 0)

I/O: reads x, mask, weight once.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..engine import tiling
from ..engine.blocks import is_last, load
from ..engine.buffers import COUNTERS, allocator
from ..engine.indexing import OUTER, tile_shape
from ..engine.kernel import COMPUTE, Config, Kernel
from ..engine.launch import Plan, cached_plan
from ..engine.operand import Operand, Space, constants
from ..engine.state import larger_of, largest, same
from ..engine.tensors import check_operands, traits
from ..engine.tile import both_by_lane, fetch, kept, with_rows, within_lane
from .segments import check_vectors, groups_of_rows

TILES = tl.constexpr(8)  # tiles of a chunk: so many fp32 numbers a lane adds one after another
SUM, MEAN, EXTREME = map(tl.constexpr, range(3))  # MODE
AIM = 2048  # blocks to aim for, if several share a sequence
WIDEST = 64  # columns of a tile


@triton.jit
def add_tile(state, x, mask, weight, space, m, n, config, EDGE: tl.constexpr):
    """Adds a tile to the state of the lanes (tile.by_lane), (LM, LN) each."""
    first, count, weights = state
    C: tl.constexpr = config.C
    keep, w = kept(mask, weight, space, m, n, config, EDGE)  # (BM, BN)
    v = fetch(x, space, m, n, keep, EDGE).to(C)
    if config.MODE == EXTREME:
        v, keep = both_by_lane(tl.where(keep, v, float("-inf")), keep, config)
        maximum = larger_of(first, largest(v, 2))
        ties = tl.sum(tl.where(same(v, tl.expand_dims(maximum, 2)) & keep, 1.0, 0.0), 2)
        count = tl.where(same(first, maximum), count, 0.0) + ties
        first = maximum
    else:
        if weight is not None:
            w = w.to(C)
            v = v * w
            weights += within_lane(tl.where(keep, w, 0.0), config)
        first += within_lane(tl.where(keep, v, 0.0), config)
        if mask is not None or weight is not None:
            count += within_lane(tl.where(keep, 1.0, 0.0), config)
    return first, count, weights


@triton.jit
def merged(first, count, weights, MODE: tl.constexpr):
    """Merges the states along axis 0 into one, in fp64. Sums are trees of a fixed shape."""
    if MODE == EXTREME:
        maximum = largest(first, 0)
        count = tl.sum(tl.where(same(first, maximum[None, :]), count, 0.0), 0)
    else:
        maximum = tl.sum(first, 0)
        count = tl.sum(count, 0)
    return maximum.to(tl.float64), count.to(tl.float64), tl.sum(weights, 0).to(tl.float64)


@triton.jit
def chunk_state(first_row, last_row, x, mask, weight, order, space, n, n0, config):
    """The state of rows [first_row, last_row), at most a chunk: (BN,) each, in fp64."""
    zero = tl.zeros([config.LM, config.LN], config.C)
    lowest = tl.full([config.LM, config.LN], float("-inf"), config.C)
    state = lowest if config.MODE == EXTREME else zero, tl.zeros([config.LM, config.LN], tl.float32), zero
    rows = with_rows(space, last_row)
    for m0 in range(first_row, last_row, config.BM):
        m = m0 + tl.arange(0, config.BM).to(config.I)
        if order is not None:
            m = tl.load(order + m, mask=m < last_row, other=space.M).to(config.I)
            state = add_tile(state, x, mask, weight, space, m, n, config, True)
        else:
            if config.VEC == 1:
                in_bounds = False
            else:
                in_bounds = (m0 + config.BM <= last_row) & (n0 + config.BN <= space.N)
            if in_bounds:
                state = add_tile(state, x, mask, weight, rows, m, n, config, False)
            else:
                state = add_tile(state, x, mask, weight, rows, m, n, config, True)
    return merged(state[0], state[1], state[2], config.MODE)


@triton.jit
def merge_chunks(partial, chunks, size, n, N, config):
    """Merges the states of a sequence's chunks, in order of chunk, whichever block finished last."""
    lowest = float("-inf") if config.MODE == EXTREME else 0.0
    first = tl.zeros([config.BN], tl.float64) + lowest
    count = tl.zeros([config.BN], tl.float64)
    weights = tl.zeros([config.BN], tl.float64)
    for start in range(0, chunks, config.BS):
        c = start + tl.arange(0, config.BS).to(config.I)
        inside = (c < chunks)[:, None] & (n < N)[None, :]
        offset = c[:, None] * N + n[None, :]
        maximum = tl.where(inside, load(partial + offset, inside), lowest)
        more, more_count, more_weights = merged(
            maximum, load(partial + size + offset, inside), load(partial + 2 * size + offset, inside), config.MODE
        )
        if config.MODE == EXTREME:
            larger = larger_of(first, more)
            count = tl.where(same(first, larger), count, 0.0) + tl.where(same(more, larger), more_count, 0.0)
            first = larger
        else:
            first += more
            count += more_count
        weights += more_weights
    return first, count, weights


SegmentConfig = constants("MODE EMPTY_NAN SPLIT PARTS BM BN BS LM LN VEC C I")


@triton.jit
def segment_kernel(
    x: Operand, mask: Operand, weight: Operand, bounds: tl.pointer_type, order: tl.pointer_type,
    out: tl.pointer_type, used: tl.pointer_type, partial: tl.pointer_type, counter: tl.pointer_type,
    splits: tl.tensor, slots: tl.tensor, space: Space, config: SegmentConfig,
):  # fmt: skip
    I: tl.constexpr = config.I
    CHUNK: tl.constexpr = config.BM * TILES
    SOME: tl.constexpr = mask is not None or weight is not None
    N = space.N
    across = (N + config.BN - 1) // config.BN
    block = tl.program_id(0).to(I)
    split = tl.program_id(1).to(I)
    s, n0 = block // across, block % across * config.BN
    n = tl.max_contiguous(n0 + tl.arange(0, config.BN).to(I), config.VEC)

    # (clamped: a direct call of the raw op may bring any bounds)
    begin = tl.minimum(tl.maximum(tl.load(bounds + s).to(I), 0), space.M)
    end = tl.minimum(tl.maximum(tl.load(bounds + s + 1).to(I), begin), space.M)
    chunks = tl.maximum((end - begin + CHUNK - 1) // CHUNK, 1)
    per_split = (chunks + splits - 1) // splits
    first_chunk = split * per_split
    last_chunk = tl.minimum(first_chunk + per_split, chunks)

    # A sequence of c > 1 chunks has its own slots among the partials: it has more than (c - 1) CHUNK rows, so the slots
    # of the next sequence begin at least 2 (c - 1) >= c later.
    slot = begin // CHUNK * 2
    size = slots * N
    first = tl.zeros([config.BN], tl.float64)
    count = first
    weights = first
    for chunk in range(first_chunk, last_chunk):
        first_row = begin + chunk * CHUNK
        last_row = tl.minimum(first_row + CHUNK, end)
        first, count, weights = chunk_state(first_row, last_row, x, mask, weight, order, space, n, n0, config)
        if config.PARTS:
            if chunks > 1:
                pointer = partial + (slot + chunk) * N + n
                tl.store(pointer, first, mask=n < N)
                tl.store(pointer + size, count, mask=n < N)
                tl.store(pointer + 2 * size, weights, mask=n < N)

    finished = split == 0
    if config.PARTS:
        if chunks > 1:
            if config.SPLIT:
                finished = is_last(counter + block, splits)
            else:
                tl.debug_barrier()
            if finished:
                first, count, weights = merge_chunks(partial + slot * N, chunks, size, n, N, config)
    if finished:
        if not SOME and config.MODE != EXTREME:
            count = tl.zeros([config.BN], tl.float64) + (end - begin).to(tl.float64)
        by = weights if weight is not None and config.MODE != EXTREME else count
        value = first / by if config.MODE == MEAN else first
        value = tl.where(count > 0, value, float("nan") if config.EMPTY_NAN else 0.0)
        tl.store(out + s * N + n, value.to(config.C).to(out.dtype.element_ty), mask=n < N)
        tl.store(used + s * N + n, by, mask=n < N)


SEGMENT = Kernel(segment_kernel, {None: Config(tile_bytes=16384, max_registers=(128, 128))})


def plan(mode, tensors, bounds, order, shape, sequences, compute, dtype, empty_nan, arch=None):
    """tensors: x, mask, weight."""
    outer, inner, kinds, vec, wide = groups_of_rows(tensors, shape, sequences, ())
    M, N = outer.numel, inner.numel
    config = SEGMENT.config(arch)
    elements = config.tile(tensors[0].element_size(), vec, tensors) // (2 if tensors[2] is not None else 1)
    if N == 1:  # few sequences have as many rows as its tiles
        elements //= 4
    BM, BN = tile_shape(elements, N, vec, elements, WIDEST)  # (a function of the columns alone)
    LM, LN = tiling.lanes_of(OUTER, BM, BN, vec, config.threads)
    rows = BM * TILES.value
    blocks = sequences * -(-N // BN)
    splits = 1
    if blocks < COUNTERS and M > rows:
        splits = min(-(-M // rows), max(AIM // blocks, 1))
    slots = M // rows * 2 + 2
    values = {
        "M": M,
        "N": N,
        "MODE": mode.value,
        "EMPTY_NAN": empty_nan,
        "SPLIT": splits > 1,
        "PARTS": M > rows,
        "BM": BM,
        "BN": BN,
        "BS": max(1024 // BN, 1),
        "LM": LM,
        "LN": LN,
        "VEC": vec,
        "C": COMPUTE[compute],
        "I": tl.int64 if wide else tl.int32,
        "splits": splits,
        "slots": slots,
    }
    dtypes = {"bounds": bounds.dtype, "order": None if order is None else order.dtype}
    dtypes |= {"out": dtype, "used": torch.float64, **tiling.scratch(M > rows)}
    launch_plan = Plan(
        SEGMENT, tensors, dtypes, outer, inner, kinds, vec, values, grid=(blocks, splits), wide=wide, arch=arch
    )
    if tensors[1] is tensors[2] is None and compute == torch.float32:  # three blocks to a multiprocessor, or two
        launch_plan.config = replace(launch_plan.config, max_registers=(80, 128))
    launch_plan.workspace = 3 * slots * N if M > rows else 0
    launch_plan.counters = blocks if splits > 1 else 0
    return launch_plan


def launcher(name, mode):
    """The launcher of `_<name>`, with the arguments of its schema."""

    def launch(input, mask, weight, cu_seqlens, segment_ids=None, order=None, empty_nan=False):
        tensors, rows = (input, mask, weight), (cu_seqlens, order)
        result, addresses = traits((*tensors, *rows))
        device, double = input.device, torch.float64
        dtype = double if input.dtype == double else torch.float32

        def build(arch):
            check_operands(name, input, mask, weight, *rows)
            check_vectors(name, cu_seqlens=cu_seqlens, order=order)
            wide = double in (dtype, weight is not None and weight.dtype)
            sequences = cu_seqlens.shape[0] - 1
            compute = double if wide else torch.float32
            launch_plan = plan(mode, tensors, *rows, input.shape, sequences, compute, dtype, empty_nan, arch)
            out_shape = (sequences, *input.shape[1:])
            launch_plan.outputs = [allocator(out_shape, kind, device) for kind in (dtype, double)]
            return launch_plan

        launch_plan = cached_plan((id(launch), result, empty_nan), build, device)
        out, used = [make() for make in launch_plan.outputs]
        if out.numel():
            launch_plan((*tensors, *rows, out, used, *tiling.workspace(launch_plan, device)), addresses)
        return out, used

    launch.__name__ = launch.__qualname__ = name
    return launch


segment_sum = launcher("segment_sum", SUM)
segment_mean = launcher("segment_mean", MEAN)
segment_max = launcher("segment_max", EXTREME)

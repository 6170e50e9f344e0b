"""Predicts the time of a kernel on a GPU from its machine code and its launch plan, without that GPU.

    time = launch + serial round trips x latency
         + max(bytes / bandwidth, instructions / issue rate, bytes read x latency / bytes in flight)

`docs/gpu-model.md` says where the figures are from and what is left out; `make gpu-model` writes its table.
"""

from math import ceil, prod
from typing import NamedTuple


class Gpu(NamedTuple):
    arch: int
    bandwidth: float  # TB/s that a copy reaches
    sms: int
    clock: float  # GHz
    latency: float  # us of one serial round trip: a load from memory, and the block's work before the next load
    threads: int  # most resident threads of a multiprocessor
    blocks: int  # most resident blocks of a multiprocessor
    shared: int  # KiB of a multiprocessor
    fp32: float  # fp32 warp instructions per cycle of a multiprocessor
    fp64: float


COPY = 0.9  # share of the data sheet's bandwidth that a copy reaches: 4.3 of 4.8 TB/s measured on an H200
GPUS = {
    "H200": Gpu(90, 4.8 * COPY, 132, 1.98, 0.70, 2048, 32, 228, 4, 2),
    "H100": Gpu(90, 3.35 * COPY, 132, 1.98, 0.70, 2048, 32, 228, 4, 2),
    "A100": Gpu(80, 2.04 * COPY, 108, 1.41, 0.66, 2048, 32, 164, 2, 1),
    "B200": Gpu(100, 7.7 * COPY, 148, 1.86, 0.80, 2048, 32, 228, 4, 2),
    "RTX 5090": Gpu(120, 1.79 * COPY, 170, 2.41, 0.70, 1536, 24, 100, 4, 1 / 16),
}
LAUNCH, GAP = 2.5, 1.0  # us of a launch: on an idle GPU; right after another kernel
LOADED = 2  # latencies that a load takes while the memory is saturated
ISSUE, ALU, IMAD, LSU, XU = 4, 2, 2, 1, 0.5  # warp instructions per cycle of a multiprocessor
REGISTERS = 65536


# kernel -> the operands that it writes; other kernels write those of GRADIENTS. All pointers that are not operands are
# written.
WRITTEN = {
    "rows_kernel": ("out", "first", "second"),
    "cosine_kernel": ("loss", "out", "first", "second"),
    "lpips_kernel": ("out", "product", "first", "second"),
    "triplet_kernel": ("loss", "used", "near", "far", "apart"),
    "cross_entropy_kernel": ("loss", "keep", "weights", "row_stats"),
    "nll_loss_kernel": ("loss", "keep", "weights"),
    "box_kernel": ("loss", "keep", "used", "dx", "dy"),
    "multi_margin_kernel": ("loss", "keep", "used", "dx"),
}
GRADIENTS = ("out", "dx", "dy", "dz", "dq")
PER_SEQUENCE = ("extreme", "grad", "denominator")  # operands of segment_backward_kernel with one value per sequence
EXTRA = ("used", "origin", "scale", "product", "first", "second", "row_stats")  # outputs that are saved for backward


class Load(NamedTuple):
    """The work of one launch, in numbers that its plan gives."""

    elements: int
    tiles: int
    blocks: int
    threads: int
    tile: int  # bytes that one tile reads
    read: int
    written: int
    extra: int  # bytes written that the op's caller did not ask for: they are saved for the backward
    rounds: int  # serial round trips of the last block, which adds up the other blocks' partial results
    each: int = 0  # serial round trips of each block that uses that sum
    waits: float = 0  # how often a block waits for memory outside of its loops
    pieces: int = 0  # passes of the loops around the loops over tiles
    overlap: float = 1  # bytes loaded per byte needed, in a loop that sums unaligned rows


def load_of(plan):
    """Returns the Load of a Triton kernel's plan."""
    kernel, values = plan.kernel, plan.values
    batch, outer, inner = plan.shapes
    BM, BN = values["BM"], values["N" if "DENSE" in values else "BN"]  # DENSE: a tile of boxes has all four edges
    shape = (*batch, *outer, *inner)
    tile = read = written = extra = 0
    for name in (kernel.pointers[i] for i in plan.present):
        size = plan.dtypes[name].itemsize
        if name in kernel.operands:
            o, i, b = plan.strides[name]
            count = prod(n for n, step in zip(shape, (*b, *o, *i)) if step)
            if "segments" in values and name in PER_SEQUENCE:
                count = count // values["M"] * values["segments"]
        else:
            count = values.get("outputs", 0) if name not in ("partial", "counter") else 0
        if name not in kernel.operands or name in WRITTEN.get(kernel.fn.__name__, GRADIENTS):
            written += count * size
            extra += count * size * (name in EXTRA)
        else:
            read += count * size
            tile += size * BM * BN * (2 * count > prod(shape))
    tiles = prod(batch) * ceil(values["M"] / BM) * ceil(values["N"] / BN)
    blocks, threads = prod(plan.grid), plan.config.threads
    rounds = each = 0
    parts, groups = values.get("pieces", values.get("splits", 1)), values.get("groups", 0)
    if values["splits"] > 1 if groups else values.get("SPLIT"):
        # round trips: one for a store with its fence, one for the count, and those that load the partial results
        rounds = 2 + ceil(parts / values["BS"])
        if kernel.fn.__name__ in ("rows_kernel", "rows_backward_kernel"):  # these may store and count twice
            each = 1
            rounds = rounds + 2 if parts > values["BS"] else 2
    elif groups and parts > 1 and plan.workspace:  # a block adds up partial results that it stored itself
        rounds = ceil(parts / values["BS"])
    pieces = groups * parts or blocks
    overlap = 1
    if values.get("PEEL") and "pieces" in values and plan.workspace:  # a thread also loads words at its neighbor's end
        overlap = {2: 1.5, 4: 1.25}.get(plan.dtypes["x"].itemsize, 1)
    waits = float("segments" in values)  # a block first finds its sequence, then waits for that sequence's values
    return Load(prod(shape), tiles, blocks, threads, tile, read, written, extra, rounds, each, waits, pieces, overlap)


class Prediction(NamedTuple):
    time: float  # us
    share: float  # time of a copy of the bytes that must be moved, over this time
    bound: str  # which term of the time is largest
    instructions: float  # of one thread, per element
    in_flight: float  # KiB being loaded at a time, per multiprocessor


def cycles(work, gpu):
    """Returns the cycles that one warp's work takes on a multiprocessor: those of the schedulers, or of the busiest
    pipe."""
    n = work.counts
    fma = max(n["imad"] / IMAD, (n["imad"] + n["fma"]) / gpu.fp32)
    return max(work.instructions / ISSUE, n["alu"] / ALU, fma, n["lsu"] / LSU, n["xu"] / XU, n["fp64"] / gpu.fp64)


def predict_all(parts, read, written, gpu):
    """Returns the Prediction of an op that makes several launches in a row. parts: their [(Code, Load)]. read, written:
    the bytes that the op must move."""
    results = [predict(*part, gpu) for part in parts]
    time = sum(it.time for it in results) - (len(results) - 1) * (LAUNCH - GAP)
    longest = max(results, key=lambda it: it.time)
    instructions = sum(it.instructions * load.elements for it, (_, load) in zip(results, parts)) / parts[0][1].elements
    share = (LAUNCH + gpu.latency + (read + written) / gpu.bandwidth / 1e6) / time
    return Prediction(time, share, longest.bound, instructions, longest.in_flight)


def predict(code, load, gpu):
    if not load.blocks:  # a memset
        return Prediction(LAUNCH + gpu.latency + load.written / gpu.bandwidth / 1e6, 1, "bytes", 0, 0)
    warps = load.threads / 32
    fit = REGISTERS // (ceil(code.registers / 8) * 8 * load.threads)
    fit = min(fit, gpu.threads // load.threads, gpu.blocks, gpu.shared // (ceil(code.shared / 1024) + 1))
    used = min(gpu.sms, load.blocks)
    resident = min(fit, ceil(load.blocks / used))
    work = load.blocks * warps * cycles(code.once, gpu)
    instructions = load.blocks * warps * code.once.instructions
    tiles, around = ([loop for loop in code.loops if loop.around is which] for which in (False, True))
    for loop in around:
        work += load.pieces * warps * cycles(loop, gpu)
        instructions += load.pieces * warps * loop.instructions
    for loop in tiles:
        at_once = round(loop.load * load.threads / load.tile / load.overlap) if load.tile else 1
        passes = load.tiles / max(at_once, 1)
        work += passes * warps * cycles(loop, gpu)
        instructions += passes * warps * loop.instructions
    moved = load.read * max(len(tiles), 1) + load.written
    in_flight = resident * load.threads * max(w.load for w in tiles or [code.once]) / load.overlap
    if load.waits:  # the mean over all waits of a block, in loops and outside
        in_flight = resident * load.read / load.blocks / (load.waits + code.once.waits)
    terms = {
        "bytes": moved / gpu.bandwidth / 1e6,
        "instructions": work / used / gpu.clock / 1e3,
        "in flight": in_flight and LOADED * gpu.latency * load.read * max(len(tiles), 1) / in_flight / used,
    }
    bound = max(terms, key=terms.get)
    rounds = 1 + load.rounds + load.each * ceil(load.blocks / 2 / (resident * used))
    time = LAUNCH + rounds * gpu.latency + terms[bound]
    floor = LAUNCH + gpu.latency + (load.read + load.written - load.extra) / gpu.bandwidth / 1e6
    return Prediction(time, floor / time, bound, instructions * 32 / load.elements, in_flight / 1024)

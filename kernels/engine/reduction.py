"""The reduction skeleton: sums of keep ? w * f(x - y) : 0 over any dimensions, in one launch.

Tiles are (BM, BN) over an outer and an inner group of dimensions; the inner group holds the one nearest in
memory. What is reduced is the inner group (rows), the outer group (columns) or both, and nothing else differs.
Where there are too few outputs to fill a GPU, the tiles of one output block are split among several blocks, and
the last block to finish adds their partial sums. Each sum is added in a fixed order: results are the same bits
in every run, on every number of multiprocessors.

A lane adds at most FLUSH fp32 terms in sequence; tl.sum adds lanes as a tree, and all above that is fp64.
"""

import triton
import triton.language as tl

from .indexing import fetch, spread
from .launch import Config, Kernel

OUTER, INNER, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # AXIS: the reduced group
# DIVISOR, the second output: the count of kept elements (the sum of their weights), a tensor's or a number's value
BY_COUNT, BY_TENSOR, BY_NUMBER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# FOLD: what one thread holds of a tile, and may add up without moving data
VECTORS, COLUMNS, ROWS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FLUSH = tl.constexpr(16)


# An operand is the tuple (pointer, outer strides, inner strides); `space` is (M, N, outer shape, inner shape).


@triton.jit
def add_tile(
    total, weights, count, space, x, y, mask, weight, m, n, p0, p1,
    TERM: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    keep = tl.full([BM, BN], True, tl.int1)
    if EDGE:
        keep = (m < space[0])[:, None] & (n < space[1])[None, :]
    if MASK:
        keep &= fetch(mask, space, m, n, keep, MASK, EDGE)
    if WEIGHT:
        w = fetch(weight, space, m, n, keep, WEIGHT, EDGE)
        if w.dtype != tl.float64:
            w = w.to(tl.float32)
        keep &= w != 0  # weight 0 means masked out; NaN is kept
        w = w.to(C)
    d = fetch(x, space, m, n, keep, X, EDGE).to(C)
    if Y:
        d -= fetch(y, space, m, n, keep, Y, EDGE).to(C)
    term = TERM(d, p0, p1)
    if WEIGHT:
        term = term * w
        weights += within_thread(tl.where(keep, w, 0.0), BM, BN, FOLD, GROUP)
    if EDGE or MASK or WEIGHT:
        term = tl.where(keep, term, 0.0)
    if MASK or WEIGHT:
        count += within_thread(keep.to(tl.int32), BM, BN, FOLD, GROUP)
    return total + within_thread(tl.broadcast_to(term, (BM, BN)), BM, BN, FOLD, GROUP), weights, count


@triton.jit
def within_thread(tile, BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr):
    """Add up what one thread holds of a tile, so that accumulators take few registers: no data moves.

    VECTORS: the GROUP elements of one access; COLUMNS and ROWS: every GROUP-th column or row."""
    if FOLD == VECTORS:
        tile = tl.sum(tl.reshape(tile, (BM, BN // GROUP, GROUP)), 2)
    elif FOLD == COLUMNS:
        tile = tl.sum(tl.reshape(tile, (BM, BN // GROUP, GROUP)), 1)
    else:
        tile = tl.sum(tl.reshape(tile, (BM // GROUP, GROUP, BN)), 0)
    return tile


@triton.jit
def over_axis(tile, AXIS: tl.constexpr):
    """The sum of a tile over the reduced group, one fp64 entry per output."""
    if AXIS == ALL:
        result = tl.sum(tl.sum(tile, 1, keep_dims=True), 0)
    elif AXIS == INNER:
        result = tl.sum(tile, 1)
    else:
        result = tl.sum(tile, 0)
    return result.to(tl.float64)


@triton.jit
def add_tiles(
    first, last, block, space, x, y, mask, weight, p0, p1,
    TERM: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """Sums, weights and counts of tiles [first, last), at most FLUSH of them; one entry per output."""
    DOWN: tl.constexpr = GROUP if FOLD == ROWS else BM  # the accumulators' shape
    ACROSS: tl.constexpr = BN if FOLD == ROWS else (GROUP if FOLD == COLUMNS else BN // GROUP)
    total = tl.zeros([DOWN, ACROSS], C)
    weights = tl.zeros([DOWN, ACROSS], C)
    count = tl.zeros([DOWN, ACROSS], tl.int32)
    for t in range(first, last):
        if AXIS == OUTER:
            m0, n0 = t * BM, block * BN
        elif AXIS == INNER:
            m0, n0 = block * BM, t * BN
        else:
            across = (space[1] + BN - 1) // BN
            m0, n0 = t // across * BM, t % across * BN
        m = m0 + tl.arange(0, BM).to(I)
        # 16 bytes of data per thread and access: the 16 elements that a byte mask would allow leave gaps in a warp's
        n = tl.max_contiguous(n0 + tl.arange(0, BN).to(I), VEC)
        if VEC == 1:
            whole = False
        else:
            whole = (m0 + BM <= space[0]) & (n0 + BN <= space[1])
        if whole:  # needs no bounds
            total, weights, count = add_tile(
                total, weights, count, space, x, y, mask, weight, m, n, p0, p1,
                TERM, X, Y, MASK, WEIGHT, BM, BN, FOLD, GROUP, C, False,
            )  # fmt: skip
        else:
            total, weights, count = add_tile(
                total, weights, count, space, x, y, mask, weight, m, n, p0, p1,
                TERM, X, Y, MASK, WEIGHT, BM, BN, FOLD, GROUP, C, True,
            )  # fmt: skip
    return over_axis(total, AXIS), over_axis(weights, AXIS), over_axis(count, AXIS)


@triton.jit
def gather(partial, splits, kept, outputs, BS: tl.constexpr, BO: tl.constexpr):
    """The sum over all splits of one partial per output, in order of split whoever wrote last."""
    total = tl.zeros([BO], tl.float64)
    for start in range(0, splits, BS):
        s = start + tl.arange(0, BS)
        inside = (s < splits)[:, None] & (kept < outputs)[None, :]
        # .cg: from L2, where the other blocks' stores are; L1 may hold what an earlier launch left there
        where = partial + s[:, None] * outputs + kept[None, :]
        total += tl.sum(tl.load(where, mask=inside, other=0.0, cache_modifier=".cg"), 0)
    return total


@triton.jit
def finish(
    total, weights, count, out, used, denominator, offset, inside, divisor,
    MEAN: tl.constexpr, DIVISOR: tl.constexpr, WEIGHT: tl.constexpr, EMPTY_NAN: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """value = total (/ divisor), or what stands for nothing kept; in fp64 until the store."""
    if DIVISOR == BY_TENSOR:
        by = tl.load(denominator).to(tl.float64) + count * 0
    elif DIVISOR == BY_NUMBER:
        by = divisor + count * 0
    elif WEIGHT:
        by = weights
    else:
        by = count
    if MEAN:
        total = total / by
    if EMPTY_NAN:
        value = tl.where(count > 0, total, float("nan"))
    else:
        value = tl.where(count > 0, total, 0.0)
    tl.store(out + offset, value.to(C).to(out.dtype.element_ty), mask=inside)
    tl.store(used + offset, by, mask=inside)


@triton.jit
def reduce_kernel(
    x, y, mask, weight, denominator, out, used, partial, counter,
    divisor, p0, p1,
    outer_shape, inner_shape, x_outer, x_inner, y_outer, y_inner, mask_outer, mask_inner, weight_outer, weight_inner,
    out_strides,
    M, N, tiles, splits, per_split, outputs, reduced,
    TERM: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    AXIS: tl.constexpr, MEAN: tl.constexpr, DIVISOR: tl.constexpr, EMPTY_NAN: tl.constexpr, SPLIT: tl.constexpr,
    LONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    BO: tl.constexpr = BN if AXIS == OUTER else (BM if AXIS == INNER else 1)  # outputs of one block
    block = tl.program_id(0).to(I)
    split = tl.program_id(1).to(I)
    space = (M, N, outer_shape, inner_shape)
    xs, ys = (x, x_outer, x_inner), (y, y_outer, y_inner)
    masks, ws = (mask, mask_outer, mask_inner), (weight, weight_outer, weight_inner)
    a, b = tl.full([1, 1], p0, C), tl.full([1, 1], p1, C)

    first = split * per_split
    last = tl.minimum(first + per_split, tiles)
    if LONG:
        total = tl.zeros([BO], tl.float64)
        weights = tl.zeros([BO], tl.float64)
        count = tl.zeros([BO], tl.float64)
        for start in range(first, last, FLUSH):
            some, some_weights, some_count = add_tiles(
                start, tl.minimum(start + FLUSH, last), block, space, xs, ys, masks, ws, a, b,
                TERM, X, Y, MASK, WEIGHT, AXIS, BM, BN, FOLD, GROUP, VEC, C, I,
            )  # fmt: skip
            total += some
            weights += some_weights
            count += some_count
    else:
        total, weights, count = add_tiles(
            first, last, block, space, xs, ys, masks, ws, a, b,
            TERM, X, Y, MASK, WEIGHT, AXIS, BM, BN, FOLD, GROUP, VEC, C, I,
        )  # fmt: skip

    kept = block * BO + tl.arange(0, BO).to(I)
    inside = kept < outputs
    if AXIS == OUTER:
        offset = spread(kept, inner_shape, out_strides)
    elif AXIS == INNER:
        offset = spread(kept, outer_shape, out_strides)
    else:
        offset = kept
    if not (MASK or WEIGHT):
        count = tl.zeros([BO], tl.float64) + reduced
    if SPLIT:
        size = splits * outputs  # of one array of partials: sums, then counts, then weights
        where = partial + split * outputs + kept
        tl.store(where, total, mask=inside)
        if MASK or WEIGHT:
            tl.store(where + size, count, mask=inside)
        if WEIGHT:
            tl.store(where + size * 2, weights, mask=inside)
        # All threads' partials come before the count (barrier, release), and the count before the last block's
        # reads (acquire): who counts last sees every partial.
        tl.debug_barrier()
        done = tl.atomic_add(counter + block, 1, sem="acq_rel", scope="gpu")
        if done == splits - 1:
            total = gather(partial, splits, kept, outputs, BS, BO)
            if MASK or WEIGHT:
                count = gather(partial + size, splits, kept, outputs, BS, BO)
            if WEIGHT:
                weights = gather(partial + size * 2, splits, kept, outputs, BS, BO)
            finish(
                total, weights, count, out, used, denominator, offset, inside, divisor,
                MEAN, DIVISOR, WEIGHT, EMPTY_NAN, C,
            )  # fmt: skip
            tl.store(counter + block, 0)  # as the next launch on this stream expects it
    else:
        finish(
            total, weights, count, out, used, denominator, offset, inside, divisor,
            MEAN, DIVISOR, WEIGHT, EMPTY_NAN, C,
        )  # fmt: skip


OPERANDS = ("x", "y", "mask", "weight")
REDUCE = Kernel(
    reduce_kernel,
    pointers=(*OPERANDS, "denominator", "out", "used", "partial", "counter"),
    floats=("divisor", "p0", "p1"),
    operands=OPERANDS,
    tuples=("out_strides",),
    indices=("M", "N", "tiles", "splits", "per_split", "outputs", "reduced"),
    constants=("TERM", "X", "Y", "MASK", "WEIGHT", "AXIS", "MEAN", "DIVISOR", "EMPTY_NAN", "SPLIT", "LONG",
               "BM", "BN", "BS", "FOLD", "GROUP", "VEC", "C", "I"),
    # Three blocks to a multiprocessor, or two. Left alone, the assembler spills a register or two to fit one more;
    # told of a limit it does not.
    configs={None: Config(max_registers=(80, 128))},
)  # fmt: skip

"""A tile on the device: where its elements lie, which of them are kept, loads and stores.

Rows that begin at no multiple of 16 bytes (PEELED) are read in the 16 bytes they begin in, and those they end in: what
lies there beside the row is not used, and not written. Their tiles begin `shift` columns before column 0, and `space`
is then longer: (M, N, outer shape, inner shape, shift). A tile has one of them.

An operand is the tuple (pointer, outer strides, inner strides), and `space` is (M, N, outer shape, inner shape): the
two groups of dimensions that indexing.py makes, M and N their sizes. A tile has BM rows over the outer group and BN
columns over the inner one.
"""

import triton
import triton.language as tl

from .indexing import ALL, COLUMN, INNER, LINE, OUTER, PEELED, ROW, SCALAR, STRIDED, VECTOR


@triton.jit
def offset_of(index, shape, strides):
    """The offset of a linear index over `shape`, last dimension fastest."""
    offset = index * 0
    for d in tl.static_range(len(shape) - 1, 0, -1):
        offset += (index % shape[d]) * strides[d]
        index = index // shape[d]
    return offset + index * strides[0]


@triton.jit
def corner(space, block, t, AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(first row, first column) of tile t of a block: tiles follow each other along the reduced group."""
    if AXIS == OUTER:
        m0, n0 = t * BM, block * BN
    elif AXIS == INNER:
        m0, n0 = block * BM, t * BN
    else:
        across = (space[1] + BN - 1) // BN
        m0, n0 = t // across * BM, t % across * BN
    if len(space) > 4:
        n0 -= space[4]
    return m0, n0


@triton.jit
def is_whole(space, m0, n0, BM: tl.constexpr, BN: tl.constexpr):
    """Whether a tile lies in the tensor, and needs no bounds."""
    whole = (m0 + BM <= space[0]) & (n0 + BN <= space[1])
    if len(space) > 4:
        whole &= n0 >= 0
    return whole


@triton.jit
def indices(m0, n0, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, I: tl.constexpr):
    """(rows, columns) of a tile. max_contiguous makes an access 16 bytes of data wide: a byte mask alone would allow 16
    elements, and the accesses of a warp to the data would then leave gaps between them."""
    return m0 + tl.arange(0, BM).to(I), tl.max_contiguous(n0 + tl.arange(0, BN).to(I), VEC)


@triton.jit
def within(space, m, n):
    """Which elements of a tile lie in the tensor."""
    columns = n < space[1]
    if len(space) > 4:
        u = n + space[4]  # of which other accesses have the numbers: fewer registers
        columns = (u >= space[4]) & (u < space[1] + space[4])
    return (m < space[0])[:, None] & columns[None, :]


@triton.jit
def units(space, n, VEC: tl.constexpr):
    """PEELED: columns counted from where the tiles begin, a multiple of 16 bytes."""
    return tl.multiple_of(tl.max_contiguous(n + space[4], VEC), VEC)


@triton.jit
def touched(space, m, n, VEC: tl.constexpr):
    """PEELED: the accesses that have any element of the row."""
    end = (space[1] + space[4] + VEC - 1) // VEC * VEC
    return (m < space[0])[:, None] & (units(space, n, VEC) < end)[None, :]


@triton.jit
def filled(space, m, n, VEC: tl.constexpr):
    """PEELED: the accesses that have nothing else."""
    u, first, end = units(space, n, VEC), (space[4] + VEC - 1) // VEC * VEC, (space[1] + space[4]) // VEC * VEC
    return (m < space[0])[:, None] & ((u >= first) & (u < end))[None, :]


@triton.jit
def by_lane(
    tile, BM: tl.constexpr, BN: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """(LM, LN, what one thread holds): a tile by its lanes (tiling.lanes_of)."""
    SIDE: tl.constexpr = VEC if LN * VEC <= BN else BN // LN  # neighbours of a lane
    tile = tl.reshape(tl.broadcast_to(tile, (BM, BN)), (BM // LM, LM, BN // (LN * SIDE), LN, SIDE))
    return tl.reshape(tl.permute(tile, (1, 3, 0, 2, 4)), (LM, LN, BM * BN // (LM * LN)))


@triton.jit
def both_by_lane(
    tile, keep, BM: tl.constexpr, BN: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr, VEC: tl.constexpr
):  # fmt: skip
    """The same of a tile and of what is kept of it, in the threads that hold the tile. (By itself, what is kept of one
    without a mask would be in other threads, and the tile would go there through shared memory.)"""
    both = tl.reshape(tl.join(tl.broadcast_to(tile, (BM, BN)), keep.to(tile.dtype)), (BM, 2 * BN))
    both = by_lane(both, BM, 2 * BN, LM, LN, 2 * VEC)
    tile, ones = tl.split(tl.reshape(both, (LM, LN, BM * BN // (LM * LN), 2)))
    return tile, ones != 0


@triton.jit
def within_lane(tile, BM: tl.constexpr, BN: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr, VEC: tl.constexpr):
    """Add up what one thread holds of a tile, so that accumulators take few registers: no data moves."""
    return tl.sum(by_lane(tile, BM, BN, LM, LN, VEC), 2)


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
def address(operand, space, m, n, KIND: tl.constexpr):
    """Pointers to an operand's elements of a tile: (BM, BN); (BM, 1) for ROW, (1, BN) for COLUMN and LINE, (1, 1) for
    SCALAR."""
    if KIND == SCALAR:
        where = operand[0] + tl.zeros([1, 1], tl.int32)
    elif KIND == COLUMN:
        where = operand[0] + offset_of(n, space[3], operand[2])[None, :]
    elif KIND == LINE:
        where = operand[0] + n[None, :]
    elif KIND > PEELED:
        bytes: tl.constexpr = (KIND - PEELED) * ((operand[0].dtype.element_ty.primitive_bitwidth + 7) // 8)
        start = tl.multiple_of(operand[0] + (offset_of(m, space[2], operand[1]) - space[4]), bytes)
        where = start[:, None] + units(space, n, KIND - PEELED)[None, :]
    else:
        where = operand[0] + offset_of(m, space[2], operand[1])[:, None]
        if KIND == VECTOR:
            where += n[None, :]
        elif KIND == STRIDED:
            # Neighbours in a row are nearest in memory, which single strides do not say: Triton would lay lanes along
            # columns. (Accesses stay single: of the pointer itself no alignment is known.) A row of one element, as
            # an empty tensor has, holds no two that are contiguous: Triton would not compile it.
            where += offset_of(n, space[3], operand[2])[None, :]
            if n.shape[0] > 1:
                where = tl.max_contiguous(where, [1, 2])
    return where


@triton.jit
def fetch(operand, space, m, n, keep, KIND: tl.constexpr, EDGE: tl.constexpr, OTHER: tl.constexpr = 0):
    """One operand's elements of a tile, OTHER outside the tensor (EDGE: the tile reaches over it); of PEELED anything.

    Elements that are not kept are skipped only where accesses are single elements anyway: a predicate that differs
    inside a 16-byte access would break it up."""
    where = address(operand, space, m, n, KIND)
    if KIND == STRIDED:
        value = tl.load(where, mask=keep, other=OTHER)
    elif KIND == SCALAR or not EDGE:
        value = tl.load(where)
    elif KIND == ROW:
        value = tl.load(where, mask=(m < space[0])[:, None], other=OTHER)
    elif KIND == COLUMN or KIND == LINE:
        value = tl.load(where, mask=(n < space[1])[None, :], other=OTHER)
    elif KIND > PEELED:
        value = tl.load(where, mask=touched(space, m, n, KIND - PEELED))
    else:
        value = tl.load(where, mask=within(space, m, n), other=OTHER)
    return value


@triton.jit
def kept(
    space, mask, weight, m, n,
    MASK: tl.constexpr, WEIGHT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """(which elements of a tile count, their weights in fp32 or fp64, or anything where there are none)."""
    keep = tl.full([BM, BN], True, tl.int1)
    if EDGE:
        keep = within(space, m, n)
    if MASK:
        keep &= fetch(mask, space, m, n, keep, MASK, EDGE)
    w = keep
    if WEIGHT:
        w = fetch(weight, space, m, n, keep, WEIGHT, EDGE)
        if w.dtype != tl.float64:
            w = w.to(tl.float32)
        keep &= w != 0  # weight 0 means masked out; NaN is kept
    return keep, w


@triton.jit
def store(operand, space, m, n, value, inside, KIND: tl.constexpr, EDGE: tl.constexpr):
    """A gradient too large for the dtype becomes inf, never the largest number: a gradient scaler looks for it.

    Several threads may hold an element, such as the number of a row, and on its way to another layout Triton has each
    of them store it. Their bits are the same: they hold what all of them computed from the same sum, and lanes that
    exchange the parts of a sum add two rounded numbers, in either order (math.rounded_product)."""
    where = address(operand, space, m, n, KIND)
    value = value.to(operand[0].dtype.element_ty)
    if EDGE and KIND > PEELED:
        wide = filled(space, m, n, KIND - PEELED)
        tl.store(where, value, mask=wide)
        tl.store(where, value, mask=inside & ~wide)
    elif EDGE:
        tl.store(where, value, mask=inside)
    else:
        tl.store(where, value)

"""A tile on the device: where its elements lie, which of them are kept, loads and stores.

A tile has BM rows and BN columns of the space (operand.py). `m` (BM,) holds the indices of its rows, `n` (BN,) those of
its columns.

A row that begins at no multiple of 16 bytes (PEELED) is read from the 16 bytes it begins in to those it ends in. The
elements there beside the row are not used and not written. Such a tile has one row. Where rows are summed, the tile's
columns are those of an aligned row (unaligned.py), so that lanes do not depend on where a row begins. Where rows are
written, the first tile begins with the 16 bytes that the row begins in.
"""

import triton
import triton.language as tl

from .indexing import ALL, COLUMN, INNER, LINE, OUTER, PEELED, ROW, SCALAR, STRIDED, UNALIGNED, VECTOR
from .operand import Space
from .unaligned import fetch_unaligned


@triton.jit
def offset_of(index, shape, strides):
    """The offset of a linear index over `shape`, last dimension fastest."""
    offset = index * 0
    for d in tl.static_range(len(shape) - 1, 0, -1):
        offset += (index % shape[d]) * strides[d]
        index = index // shape[d]
    return offset + index * strides[0]


@triton.jit
def corner(space, block, t, config):
    """Returns (first row, first column) of tile t of a block. Its tiles follow each other along the reduced group."""
    if config.AXIS == OUTER:
        m0, n0 = t * config.BM, block * config.BN
    elif config.AXIS == INNER:
        m0, n0 = block * config.BM, t * config.BN
    else:
        across = (space.N + config.BN - 1) // config.BN
        m0, n0 = t // across * config.BM, t % across * config.BN
    if len(space.span) > 0:
        n0 -= space.span[0]
    return m0, n0


@triton.jit
def is_whole(space, m0, n0, config):
    """True if all of a tile lies in the tensor, so that it needs no bounds."""
    inside = (m0 + config.BM <= space.M) & (n0 + config.BN <= space.N)
    if len(space.span) > 0:
        inside &= n0 >= 0
    return inside


@triton.jit
def indices(m0, n0, config):
    """Returns (row indices, column indices) of a tile. max_contiguous limits an access to 16 bytes of data: a byte mask
    alone would allow 16 elements, and the accesses of a warp to the data would then leave gaps between them."""
    m = m0 + tl.arange(0, config.BM).to(config.I)  # (BM,)
    return m, tl.max_contiguous(n0 + tl.arange(0, config.BN).to(config.I), config.VEC)  # (BM,), (BN,)


@triton.jit
def within(space, m, n):
    """Bool (BM, BN): True where an element of the tile lies in the tensor."""
    columns = n < space.N
    if len(space.span) > 0:
        u = n + space.span[0]  # aligned_columns computes this sum, too: fewer registers
        columns = (u >= space.span[0]) & (u < space.span[1])
    return (m < space.M)[:, None] & columns[None, :]


@triton.jit
def aligned_columns(space, n, VEC: tl.constexpr):
    """PEELED: columns counted from where the tiles begin, a multiple of 16 bytes."""
    return tl.multiple_of(tl.max_contiguous(n + space.span[0], VEC), VEC)


@triton.jit
def row_accesses(space, m, n, VEC: tl.constexpr):
    """PEELED, bool: True for accesses that have any element of the row."""
    end = (space.span[1] + VEC - 1) // VEC * VEC
    return (m < space.M)[:, None] & (aligned_columns(space, n, VEC) < end)[None, :]


@triton.jit
def full_accesses(space, m, n, VEC: tl.constexpr):
    """PEELED, bool: True for accesses that have only elements of the row."""
    first, end = (space.span[0] + VEC - 1) // VEC * VEC, space.span[1] // VEC * VEC
    u = aligned_columns(space, n, VEC)
    return (m < space.M)[:, None] & ((u >= first) & (u < end))[None, :]


@triton.jit
def split_by_lane(tile, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, config):
    """A tile (BM, BN) reordered by lane: (LM, LN, elements of a lane). A lane is what one thread holds
    (tiling.lanes_of)."""
    LM: tl.constexpr = config.LM
    LN: tl.constexpr = config.LN
    SIDE: tl.constexpr = VEC if LN * VEC <= BN else BN // LN  # neighbouring columns of a lane
    tile = tl.reshape(tl.broadcast_to(tile, (BM, BN)), (BM // LM, LM, BN // (LN * SIDE), LN, SIDE))
    return tl.reshape(tl.permute(tile, (1, 3, 0, 2, 4)), (LM, LN, BM * BN // (LM * LN)))


@triton.jit
def by_lane(tile, config):
    return split_by_lane(tile, config.BM, config.BN, config.VEC, config)


@triton.jit
def both_by_lane(tile, keep, config):
    """Returns (tile, keep), both by lane, in the threads that hold the tile. (Without a mask, `keep` by itself would be
    in other threads, and the tile would go there through shared memory.)"""
    BM: tl.constexpr = config.BM
    BN: tl.constexpr = config.BN
    both = tl.reshape(tl.join(tl.broadcast_to(tile, (BM, BN)), keep.to(tile.dtype)), (BM, 2 * BN))
    both = split_by_lane(both, BM, 2 * BN, 2 * config.VEC, config)
    tile, ones = tl.split(tl.reshape(both, (config.LM, config.LN, BM * BN // (config.LM * config.LN), 2)))
    return tile, ones != 0


@triton.jit
def within_lane(tile, config):
    """Adds up what each thread holds of a tile: (LM, LN). Accumulators then take few registers, and no data moves."""
    return tl.sum(by_lane(tile, config), 2)


@triton.jit
def over_axis(tile, config):
    """The sum of a tile over the reduced group, one fp64 entry per output."""
    if config.AXIS == ALL:
        result = tl.sum(tl.sum(tile, 1, keep_dims=True), 0)
    elif config.AXIS == INNER:
        result = tl.sum(tile, 1)
    else:
        result = tl.sum(tile, 0)
    return result.to(tl.float64)


@triton.jit
def output_offset(output, space, parts, config):
    """The offsets of a block's outputs in the result, which is contiguous in the order of the caller's dimensions."""
    offset = output
    if config.AXIS == OUTER:
        offset = offset_of(output, space.inner_shape, parts.out_strides)
    elif config.AXIS == INNER:
        offset = offset_of(output, space.outer_shape, parts.out_strides)
    return offset


@triton.jit
def in_batch(space, batch, operands):
    """The space of one batch. operands: the kernel's first operands; an absent one gets a pointer that is not read.

    (Triton 3.6 loses the constants of a tuple that is assigned: an operand itself cannot be moved.)"""
    pointers = tl.tuple(
        [batch if o is None else o.pointer + offset_of(batch, space.batch_shape, o.batch) for o in operands]
    )
    return Space(
        space.M, space.N, space.outer_shape, space.inner_shape, space.batch_shape, pointers, space.span, space.column
    )


@triton.jit
def with_rows(space, M):
    """The space with M rows."""
    return Space(
        M, space.N, space.outer_shape, space.inner_shape, space.batch_shape, space.pointers, space.span, space.column
    )


@triton.jit
def at_shift(space, shift):
    """The space of tiles that begin `shift` columns before column 0."""
    span = shift, shift + space.N
    return Space(space.M, space.N, space.outer_shape, space.inner_shape, space.batch_shape, space.pointers, span, ())


@triton.jit
def at_column(space, n0):
    """The space for a tile whose first column is n0."""
    return Space(space.M, space.N, space.outer_shape, space.inner_shape, space.batch_shape, space.pointers, (), (n0,))


@triton.jit
def base_of(operand, space):
    """Pointer to where an operand begins in the batch of the space."""
    base = operand.pointer
    if operand.place < len(space.pointers):
        base = space.pointers[operand.place]
    return base


@triton.jit
def address(operand, space, m, n):
    """Pointers to an operand's elements of a tile: (BM, BN); (BM, 1) for ROW, (1, BN) for COLUMN and LINE, (1, 1) for
    SCALAR."""
    base = base_of(operand, space)
    if operand.kind == SCALAR:
        pointer = base + tl.zeros([1, 1], tl.int32)
    elif operand.kind == COLUMN:
        pointer = base + offset_of(n, space.inner_shape, operand.inner)[None, :]
    elif operand.kind == LINE:
        pointer = base + n[None, :]
    elif operand.kind > PEELED and operand.kind < UNALIGNED:
        VEC: tl.constexpr = operand.kind - PEELED
        bytes: tl.constexpr = VEC * ((base.dtype.element_ty.primitive_bitwidth + 7) // 8)
        start = tl.multiple_of(base + (offset_of(m, space.outer_shape, operand.outer) - space.span[0]), bytes)
        pointer = start[:, None] + aligned_columns(space, n, VEC)[None, :]
    else:
        pointer = base + offset_of(m, space.outer_shape, operand.outer)[:, None]
        if operand.kind == VECTOR or operand.kind > UNALIGNED:
            pointer += n[None, :]
        elif operand.kind == STRIDED:
            # Neighbours in a row are nearest in memory, which variable strides do not show: Triton would lay lanes
            # along columns. (Accesses stay single: the alignment of the pointer itself is unknown.) A tile of one
            # column, as an empty tensor has, has no two contiguous elements: Triton would not compile the hint.
            pointer += offset_of(n, space.inner_shape, operand.inner)[None, :]
            if n.shape[0] > 1:
                pointer = tl.max_contiguous(pointer, [1, 2])
    return pointer


@triton.jit
def load_tile(operand, space, m, n, keep, EDGE: tl.constexpr, OTHER: tl.constexpr):
    pointer = address(operand, space, m, n)
    if operand.kind == STRIDED or operand.kind > UNALIGNED:
        value = tl.load(pointer, mask=keep, other=OTHER)
    elif operand.kind == SCALAR or not EDGE:
        value = tl.load(pointer)
    elif operand.kind == ROW:
        value = tl.load(pointer, mask=(m < space.M)[:, None], other=OTHER)
    elif operand.kind == COLUMN or operand.kind == LINE:
        value = tl.load(pointer, mask=(n < space.N)[None, :], other=OTHER)
    elif operand.kind > PEELED:
        value = tl.load(pointer, mask=row_accesses(space, m, n, operand.kind - PEELED))
    else:
        value = tl.load(pointer, mask=within(space, m, n), other=OTHER)
    return value


@triton.jit
def fetch(operand, space, m, n, keep, EDGE: tl.constexpr, OTHER: tl.constexpr = 0):
    """An operand's elements of a tile, OTHER outside the tensor; undefined there for PEELED and UNALIGNED. EDGE: the
    tile may reach beyond the tensor.

    Elements that are not kept are skipped only where accesses are single elements anyway: a predicate that differs
    inside a 16-byte access would break it up."""
    VEC: tl.constexpr = (operand.kind - PEELED) % 16
    BYTES: tl.constexpr = VEC * ((operand.pointer.dtype.element_ty.primitive_bitwidth + 7) // 8)
    if operand.kind > PEELED and len(space.column) > 0 and (BYTES == 8 or BYTES == 16):
        start = base_of(operand, space) + offset_of(m, space.outer_shape, operand.outer)
        value = fetch_unaligned(start, space.column[0], space.N, m.shape[0], n.shape[0], VEC, EDGE)
    else:
        value = load_tile(operand, space, m, n, keep, EDGE, OTHER)
    return value


@triton.jit
def kept(mask, weight, space, m, n, config, EDGE: tl.constexpr):
    """Returns (keep, w): bool (BM, BN), True where an element counts, and its weight in fp32 or fp64, if it has one."""
    keep = tl.full([config.BM, config.BN], True, tl.int1)
    if EDGE:
        keep = within(space, m, n)
    if mask is not None:
        keep &= fetch(mask, space, m, n, keep, EDGE)
    w = keep
    if weight is not None:
        w = fetch(weight, space, m, n, keep, EDGE)
        if w.dtype != tl.float64:
            w = w.to(tl.float32)
        keep &= w != 0  # weight 0 means masked out; NaN is kept
    return keep, w


@triton.jit
def store(operand, space, m, n, value, inside, EDGE: tl.constexpr):
    """Stores value in the operand's dtype. A gradient that is too large for it becomes inf, never the largest finite
    number: a gradient scaler looks for inf.

    Several threads may hold an element, such as a row's number, and in changing layouts Triton has each of them store
    it. Their bits are equal: all computed it from the same sum, and lanes that exchange the parts of a sum add two
    rounded numbers, in either order (math.rounded_product)."""
    pointer = address(operand, space, m, n)
    value = value.to(operand.pointer.dtype.element_ty)
    if EDGE and operand.kind > PEELED and operand.kind < UNALIGNED:
        wide = full_accesses(space, m, n, operand.kind - PEELED)
        tl.store(pointer, value, mask=wide)
        tl.store(pointer, value, mask=inside & ~wide)
    elif EDGE:
        tl.store(pointer, value, mask=inside)
    else:
        tl.store(pointer, value)

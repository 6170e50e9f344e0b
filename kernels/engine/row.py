"""Parts that the kernels of rows share on the device, and how they are declared.

Tiles are (BM, BN) over an outer and an inner group of dimensions, of which one is the row: any dimension, through any
strides. Where it is the outer one, the inner holds the neighbours in memory of a row's elements, and what is left is
the batch, of which each block has one. A row that fits stays on the chip between its sum and its results (WHOLE): one
read, one write. A longer one is read twice, tile by tile; where there are few of them, by several blocks (SPLIT).
"""

import triton
import triton.language as tl

from .indexing import INNER, PEELED
from .kernel import Config, Kernel
from .math import rounded_product, rounded_quotient
from .operand import constants
from .scaling import BEYOND, apart, power_below, reciprocal
from .tile import at_column, at_shift, base_of, corner, indices, is_whole, offset_of, store, within

# A kernel that sums no row: a block takes one tile.
TileConfig = constants("AXIS BM BN VEC C I")


@triton.jit
def part_of(parts, across, I: tl.constexpr):
    """(part, group of rows, its batch, its block of that) of a program: the parts of a group follow each other."""
    part, group = tl.program_id(0).to(I) % parts, tl.program_id(0).to(I) // parts
    return part, group, group // across, group % across


@triton.jit
def split_of(parts, config):
    """`part_of`, of the splits of rows. There is no batch of rows along memory: two divisions less where neither is."""
    part, group = part_of(1 if config.WHOLE else parts.splits, 1, config.I)[:2]
    batch, block = group * 0, group
    if config.AXIS != INNER:
        batch, block = group // parts.across, group % parts.across
    return part, group, batch, block


@triton.jit
def piece_of(piece, parts):
    """(first tile, end) of a piece of a row."""
    start = piece * parts.per_piece
    return start, tl.minimum(start + parts.per_piece, parts.tiles)


@triton.jit
def written_tiles(first, last, parts):
    """(first tile, end) of the tiles that the block of these pieces writes."""
    return first * parts.per_piece, tl.where(last == parts.pieces, parts.written, last * parts.per_piece)


@triton.jit
def peeled(space, x, row, config):
    """The space of one row whose tiles begin with the 16 bytes that it begins in."""
    size: tl.constexpr = x.pointer.dtype.element_ty.primitive_bitwidth // 8
    start = (base_of(x, space) + offset_of(row, space.outer_shape, x.outer)).to(tl.int64, bitcast=True)
    shift = (start // size % config.VEC).to(config.I)
    return at_shift(space, shift)


@triton.jit
def tile_at(space, block, t, config):
    """(rows, columns) of tile t of the rows of a block: (BM,), (BN,)."""
    m0, n0 = corner(space, block, t, config)
    return indices(m0, n0, config)


@triton.jit
def summed_tile(space, block, t, config):
    """(the space of tile t of the rows of a block where they are summed, its rows, its columns, whether it needs no
    bounds): of PEELED rows, too, whose column 0 is that of the first tile."""
    m0, n0 = corner(space, block, t, config)
    m, n = indices(m0, n0, config)
    in_bounds = False
    if config.PEEL:
        in_bounds = is_whole(space, m0, n0, config)
    return at_column(space, n0), m, n, in_bounds


@triton.jit
def tile_is_whole(space, block, t, config):
    m0, n0 = corner(space, block, t, config)
    return is_whole(space, m0, n0, config)


@triton.jit
def store_tile(operand, space, block, t, m, n, value, config):
    in_bounds = False
    if operand.kind > PEELED:  # elements beside the row are left out one by one, if there are any
        in_bounds = tile_is_whole(space, block, t, config)
    if in_bounds:
        store(operand, space, m, n, value, True, False)
    else:
        store(operand, space, m, n, value, within(space, m, n), True)


@triton.jit
def again(m, number, space):
    """The rows m, which the compiler takes for others that depend on a number of each row: what is read at them is read
    anew, and not before."""
    nothing = tl.max(tl.max(number.to(tl.int32, bitcast=True) & (space.N >> 31).to(tl.int32), 1), 0)
    return m + nothing.to(m.dtype)


@triton.jit
def one_per_row(space, m, n, config):
    """Where a number of each row is stored: (BM, 1), or of rows across memory (1, BN)."""
    if config.AXIS == INNER:
        inside = (m < space.M)[:, None]
    else:
        inside = (n < space.N)[None, :]
    return inside


@triton.jit
def at_most(norm, eps):
    """True where eps is the divisor. A norm that is marked by a minus is beyond fp64."""
    return (norm >= 0) & (norm <= eps)


@triton.jit
def inverse(norm, eps, C: tl.constexpr):
    """1 / max(norm, eps) of fp64 as two factors in C, the second a power of two: neither overflows, and for the first
    no quotient of fp64 is needed, which every thread would work out for itself. 0 for a vector of zeros."""
    floor = tl.where(at_most(norm, eps), eps, tl.abs(norm))  # NaN stays
    if C == tl.float64:
        power = power_below(floor)
        c = floor * reciprocal(power)
        by = tl.where(norm < 0, reciprocal(power) / BEYOND, reciprocal(power))
    else:
        c, power = apart(floor)
        by = reciprocal(power)
    return tl.where(norm == 0, 0.0, rounded_quotient(1.0, c)), by


@triton.jit
def times(x, by):
    """x c, of c as two factors, one number a row."""
    c, power = by
    return x * c * power


@triton.jit
def unit_vector(x, norm, eps, C: tl.constexpr):
    """x / max(norm, eps). What has the norm 0 is all zeros, or is not kept."""
    return tl.where(norm == 0, 0.0, times(x, inverse(norm, eps, C)))


@triton.jit
def divisor(root, unit, eps):
    """The number by which x / unit is divided to be x / max(root unit, eps), root unit the norm; 1 where that is 0."""
    small = tl.full([1, 1], eps, root.dtype) * reciprocal(unit).to(root.dtype)
    by = tl.where(root <= small, small, root)  # NaN stays
    return tl.where(by == 0, 1.0, by)


@triton.jit
def is_ordinary(squares, inside):
    """True if no sum of squares of a block has overflowed, nor is so small that squares may have vanished from it."""
    least: tl.constexpr = 2.0**-900 if squares.dtype == tl.float64 else 2.0**-100
    ordinary = (squares >= least) & (squares < float("inf")) | ~inside
    return tl.min(tl.min(ordinary.to(tl.int32), 1), 0) != 0


@triton.jit
def scaled_squares(x, ACROSS: tl.constexpr):
    """(unit, x / unit, sum of (x / unit)^2) of each row, with a unit for which the sum does not overflow."""
    unit = power_below(tl.max(tl.abs(x), ACROSS, keep_dims=True))
    x = x * reciprocal(unit)
    return unit, x, tl.sum(rounded_product(x, x), ACROSS, keep_dims=True)


# Left alone, the assembler spills two registers of the general variant to fit one block more.
REGISTERS = (None, 128)


def declare(fn, **config):
    """A kernel of rows. config: how many threads, bytes of a tile, and the most registers."""
    return Kernel(fn, {None: Config(**{"max_registers": REGISTERS, **config})})

"""Device functions that the kernels of rows share, and how these kernels are declared.

Tiles are (BM, BN) over an outer and an inner group of dimensions. One of the two is the row: any dimension, with any
strides. If the row is the outer group (rows across memory), the inner group holds the memory neighbours of its
elements. The other dimensions are the batch, and a block has one index of it. A row that fits stays on the chip between
its sum and its results (WHOLE): one read, one write. A longer row is read twice, tile by tile; if there are
few rows, several blocks share each (SPLIT).
"""

import triton
import triton.language as tl

from .indexing import INNER, PEELED
from .kernel import Config, Kernel
from .math import rounded_product, rounded_quotient
from .operand import constants
from .scaling import BEYOND, apart, power_below, reciprocal
from .tile import at_column, at_shift, base_of, corner, indices, is_whole, offset_of, store, within

# The config of a kernel that sums no row: a block takes one tile.
TileConfig = constants("AXIS BM BN VEC C I")


@triton.jit
def part_of(parts, across, I: tl.constexpr):
    """Returns (part, group of rows, its batch, its block in the batch). A group's parts are consecutive programs."""
    part, group = tl.program_id(0).to(I) % parts, tl.program_id(0).to(I) // parts
    return part, group, group // across, group % across


@triton.jit
def split_of(parts, config):
    """`part_of` for the splits of rows. Whole rows and rows along memory (no batch) need fewer divisions."""
    part, group = part_of(1 if config.WHOLE else parts.splits, 1, config.I)[:2]
    batch, block = group * 0, group
    if config.AXIS != INNER:
        batch, block = group // parts.across, group % parts.across
    return part, group, batch, block


@triton.jit
def piece_of(piece, parts):
    """Returns (first tile, end) of a piece of a row."""
    start = piece * parts.per_piece
    return start, tl.minimum(start + parts.per_piece, parts.tiles)


@triton.jit
def written_tiles(first, last, parts):
    """Returns (first tile, end) of the tiles that the block with pieces [first, last) writes."""
    return first * parts.per_piece, tl.where(last == parts.pieces, parts.written, last * parts.per_piece)


@triton.jit
def peeled(space, x, row, config):
    """The space of a PEELED row: its tiles begin at the row's first element, rounded down to a multiple of VEC."""
    size: tl.constexpr = x.pointer.dtype.element_ty.primitive_bitwidth // 8
    start = (base_of(x, space) + offset_of(row, space.outer_shape, x.outer)).to(tl.int64, bitcast=True)
    shift = (start // size % config.VEC).to(config.I)
    return at_shift(space, shift)


@triton.jit
def tile_at(space, block, t, config):
    """Returns (row indices (BM,), column indices (BN,)) of tile t of a block's rows."""
    m0, n0 = corner(space, block, t, config)
    return indices(m0, n0, config)


@triton.jit
def summed_tile(space, block, t, config):
    """Returns (space, rows, columns, True if no bounds are needed) for summing tile t of a block's rows. In sums, a
    PEELED row, too, has its column 0 at the beginning of the first tile."""
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
    if operand.kind > PEELED:  # other kinds always mask elements beside the row
        in_bounds = tile_is_whole(space, block, t, config)
    if in_bounds:
        store(operand, space, m, n, value, True, False)
    else:
        store(operand, space, m, n, value, within(space, m, n), True)


@triton.jit
def again(m, number, space):
    """The row indices m, made to depend on `number` (one per row) for the compiler: it loads elements at these indices
    again, after `number` is known, instead of holding them in registers."""
    nothing = tl.max(tl.max(number.to(tl.int32, bitcast=True) & (space.N >> 31).to(tl.int32), 1), 0)
    return m + nothing.to(m.dtype)


@triton.jit
def one_per_row(space, m, n, config):
    """Bool (BM, 1), or (1, BN) for rows across memory: True for rows in the tensor. The mask of per-row numbers."""
    if config.AXIS == INNER:
        inside = (m < space.M)[:, None]
    else:
        inside = (n < space.N)[None, :]
    return inside


@triton.jit
def at_most(norm, eps):
    """True where norm <= eps: then eps is the divisor. A negative norm stands for one beyond fp64 (scaling.BEYOND)."""
    return (norm >= 0) & (norm <= eps)


@triton.jit
def inverse(norm, eps, C: tl.constexpr):
    """1 / max(norm, eps), 0 where the norm is 0. norm: fp64. The result is two factors in C, the second a power of two,
    so that neither overflows. For C = fp32 the division is in fp32: every thread does it, and fp64 is slow."""
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
    """x * by[0] * by[1]: x times a factor that comes as two numbers, one pair per row."""
    c, power = by
    return x * c * power


@triton.jit
def unit_vector(x, norm, eps, C: tl.constexpr):
    """x / max(norm, eps); 0 where the norm is 0, since the vector is all zeros, or not kept."""
    return tl.where(norm == 0, 0.0, times(x, inverse(norm, eps, C)))


@triton.jit
def divisor(root, unit, eps):
    """The number that divides x / unit to give x / max(norm, eps), where norm = root * unit; 1 in place of 0."""
    small = tl.full([1, 1], eps, root.dtype) * reciprocal(unit).to(root.dtype)
    by = tl.where(root <= small, small, root)  # NaN stays
    return tl.where(by == 0, 1.0, by)


@triton.jit
def is_ordinary(squares, inside):
    """True if each sum of squares of a block is finite, and so large that squares which underflowed do not matter."""
    least: tl.constexpr = 2.0**-900 if squares.dtype == tl.float64 else 2.0**-100
    ordinary = (squares >= least) & (squares < float("inf")) | ~inside
    return tl.min(tl.min(ordinary.to(tl.int32), 1), 0) != 0


@triton.jit
def scaled_squares(x, ACROSS: tl.constexpr):
    """Returns (unit, x / unit, sum of (x / unit)^2) per row. unit: a power of two that keeps the sum in range."""
    unit = power_below(tl.max(tl.abs(x), ACROSS, keep_dims=True))
    x = x * reciprocal(unit)
    return unit, x, tl.sum(rounded_product(x, x), ACROSS, keep_dims=True)


# Without a limit the assembler spills two registers of the general variant to fit one more block.
REGISTERS = (None, 128)


def declare(fn, **config):
    """Declares a kernel of rows. config: fields of kernel.Config."""
    return Kernel(fn, {None: Config(**{"max_registers": REGISTERS, **config})})

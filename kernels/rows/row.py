"""What the kernels of rows share on the device, and how they are declared.

Tiles are (BM, BN) over an outer and an inner group of dimensions, of which one is the row: any dimension, through any
strides. Where it is the outer one, the inner holds the neighbours in memory of a row's elements, and what is left is
the batch, of which each block has one. A row that fits stays on the chip between its sum and its results (WHOLE): one
read, one write. A longer one is read twice, tile by tile; where there are few of them, by several blocks (SPLIT).
"""

import triton
import triton.language as tl

from ..engine.indexing import INNER, PEELED
from ..engine.kernel import Config, Kernel
from ..engine.math import rounded_product
from ..engine.scaling import BEYOND, apart, power_below, reciprocal
from ..engine.tile import corner, indices, is_whole, offset_of, store, within


@triton.jit
def shift_of(operand, row, shape, VEC: tl.constexpr, I: tl.constexpr):
    """How many elements after a multiple of 16 bytes a row begins."""
    size: tl.constexpr = operand[0].dtype.element_ty.primitive_bitwidth // 8
    start = (operand[0] + offset_of(row, shape, operand[1])).to(tl.int64, bitcast=True)
    return (start // size % VEC).to(I)


@triton.jit
def part_of(parts, across, I: tl.constexpr):
    """(part, group of rows, its batch, its block of that) of a program: the parts of a group follow each other."""
    part, group = tl.program_id(0).to(I) % parts, tl.program_id(0).to(I) // parts
    return part, group, group // across, group % across


@triton.jit
def at_batch(pointer, outer, inner, steps, batch, shape):
    """An operand (engine/tile.py) of a batch; in the place of one that is absent what nobody reads."""
    operand = batch, batch, batch
    if pointer is not None:
        operand = pointer + offset_of(batch, shape, steps), outer, inner
    return operand


@triton.jit
def tile_at(
    space, block, t, AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, I: tl.constexpr
):
    """(rows, columns) of tile t of the rows of a block."""
    m0, n0 = corner(space, block, t, AXIS, BM, BN)
    return indices(m0, n0, BM, BN, VEC, I)


@triton.jit
def tile_is_whole(space, block, t, AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    m0, n0 = corner(space, block, t, AXIS, BM, BN)
    return is_whole(space, m0, n0, BM, BN)


@triton.jit
def store_tile(
    operand, space, block, t, m, n, value, KIND: tl.constexpr, AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    whole = False
    if KIND > PEELED:  # elements beside the row are left out one by one, if there are any
        whole = tile_is_whole(space, block, t, AXIS, BM, BN)
    if whole:
        store(operand, space, m, n, value, True, KIND, False)
    else:
        store(operand, space, m, n, value, within(space, m, n), KIND, True)


@triton.jit
def one_per_row(space, m, n, AXIS: tl.constexpr):
    """Where a number of each row is stored."""
    if AXIS == INNER:
        inside = (m < space[0])[:, None]
    else:
        inside = (n < space[1])[None, :]
    return inside


@triton.jit
def times(x, c, C: tl.constexpr):
    """x c, for c in fp64, one number a row."""
    if C == tl.float64:
        value = x * c
    else:
        c, power = apart(c)
        value = x * c * power
    return value


@triton.jit
def at_most(norm, eps):
    """Whether eps is the divisor. A norm that is marked by a minus is beyond fp64."""
    return (norm >= 0) & (norm <= eps)


@triton.jit
def inverse(norm, eps):
    """1 / max(norm, eps), 0 for a vector of zeros."""
    floor = tl.where(at_most(norm, eps), eps, tl.abs(norm))  # NaN stays
    by = 1 / tl.where(floor == 0, 1.0, floor)
    return tl.where(norm == 0, 0.0, tl.where(norm < 0, by / BEYOND, by))


@triton.jit
def divisor(norm, eps, C: tl.constexpr):
    """What `divided` takes of each row, with max(norm, eps) for its divisor, or 0 for a vector of zeros: in fp64 that
    divisor, whose inverse may be too large, and for what is narrower the inverse."""
    if C == tl.float64:
        by = tl.where(norm == 0, 0.0, tl.where(at_most(norm, eps), eps, norm))
    else:
        by = inverse(norm, eps)
    return by


@triton.jit
def divided(x, by, C: tl.constexpr):
    """x over its row's divisor, 0 where that is 0; by: what `divisor` has made of it."""
    if C == tl.float64:
        quotient = x / tl.where(by == 0, 1.0, tl.abs(by))
        value = tl.where(by == 0, 0.0, tl.where(by < 0, quotient / BEYOND, quotient))
    else:
        value = times(x, by, C)
    return value


@triton.jit
def scaled_squares(x, ACROSS: tl.constexpr):
    """(unit, x / unit, sum of (x / unit)^2) of each row, with a unit for which the sum does not overflow."""
    unit = power_below(tl.max(tl.abs(x), ACROSS, keep_dims=True))
    x = x * reciprocal(unit)
    return unit, x, tl.sum(rounded_product(x, x), ACROSS, keep_dims=True)


def declare(fn, operands, *first, split=True, floats=("eps",), indices=(), **config):
    """A kernel of rows; split: one that may spread a row over several blocks. first, indices: constants and indices of
    its own. config: how many threads, and bytes of a tile."""
    tiling = ("WHOLE", "SPLIT", "LONG", "BM", "BN", "BS") if split else ("BM", "BN")
    peel = ("PEEL",) if "PEEL" in fn.arg_names else ()  # one that knows rows which begin anywhere
    return Kernel(
        fn,
        pointers=(*operands, "partial", "counter") if split else operands,
        floats=floats,
        operands=operands,
        tuples=("batch_shape", *(f"{name}_batch" for name in operands)),
        indices=("M", "N", "tiles", "across", *(("groups", "splits", "per_split") if split else ()), *indices),
        constants=(*first, *(name.upper() for name in operands), *peel, "AXIS", *tiling,
                   *(("LM", "LN") if split else ()), "VEC", "C", "I"),
        # left alone, the assembler spills two registers of the general variant to fit one block more
        configs={None: Config(max_registers=(None, 128), **config)},
    )  # fmt: skip

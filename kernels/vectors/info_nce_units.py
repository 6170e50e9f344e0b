"""The rows that info_nce_loss multiplies, and how its kernels are launched.

    x' = 2^e x, with 256 <= |x'| < 512        units (2, P, W): the queries, then the keys

P is N, and W the vectors' width, both filled up with zeros to whole tiles, so that no load is masked. row_stats (6, P):
1 / |x'| of queries and of keys (MISSING where there is no such row), the exponents e of both (NO_SLOPE where a row has
no gradient), and two numbers per query that the products leave (info_nce.py).
"""

import triton
import triton.language as tl

from ..engine.indexing import Group
from ..engine.kernel import Kernel
from ..engine.launch import Plan, cached_plan
from ..engine.math import rounded_product, rounded_quotient, rounded_root
from ..engine.operand import constants
from ..engine.scaling import power_below, reciprocal
from ..engine.tensors import check_operands, traits

TILE = 128  # queries of a block, and keys that it takes at once
WHOLE = 256  # rows up to this width stay in shared memory, if there is enough of it
STEP = 64  # columns of wider rows that are taken at once
ROW_TILE = 2048  # numbers of a tile of rows: two rows of the widest
MISSING, NO_SLOPE = tl.constexpr(-1.0), tl.constexpr(-1023.0)


@triton.jit
def exponent(power):
    """The exponent of a result of power_below, as an fp32 number."""
    return ((power.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.float32)


@triton.jit
def scale_rows(x, strides, keep, keep_stride, out, row_stats, rows, columns, padded, width, config):
    """Stores x', 1 / |x'| and e of a tile of rows. VEC: so many numbers of a row are contiguous, at a multiple of 16
    bytes; row strides and columns are counted in units of VEC."""
    m = tl.program_id(0) * config.BM + tl.arange(0, config.BM)
    n = tl.arange(0, config.BN)
    there = m < rows
    if keep is not None:
        there = there & (tl.load(keep + m.to(tl.int64) * keep_stride, mask=there, other=0) != 0)
    pointer = x + m.to(tl.int64)[:, None] * (strides[0] * config.VEC)
    pointer = pointer + (n if config.VEC > 1 else n.to(tl.int64) * strides[1])[None, :]
    if config.VEC > 1:
        pointer = tl.multiple_of(pointer, (16, 16))
    else:  # neighbours in a row are nearest, as in engine/tile.py
        pointer = tl.max_contiguous(pointer, [1, 2])
    value = tl.load(pointer, mask=there[:, None] & (n < columns * config.VEC)[None, :], other=0.0).to(tl.float32)
    unit = power_below(tl.max(tl.abs(value), 1))
    value = value * reciprocal(unit)[:, None]
    norm = rounded_root(tl.sum(rounded_product(value, value), 1))
    sloped = there & (norm != 0)
    norm = tl.where(norm == 0, 1.0, norm)  # all are at least 1 now
    other = power_below(norm)
    inverse = rounded_quotient(1.0 / 256, norm * reciprocal(other))
    inverse = tl.where(norm == float("inf"), float("nan"), inverse)
    value = value * (reciprocal(other) * 256)[:, None]
    pointer = tl.multiple_of(out + m[:, None] * width + n[None, :], (16, 16))
    tl.store(pointer, value.to(out.dtype.element_ty), mask=(n < width)[None, :])
    tl.store(row_stats + m, tl.where(there, inverse, MISSING))
    tl.store(row_stats + 2 * padded + m, tl.where(sloped, 8 - exponent(unit) - exponent(other), NO_SLOPE))


UnitsConfig = constants("BM BN STEP VEC")


@triton.jit
def info_nce_units_kernel(
    query: tl.pointer_type, key: tl.pointer_type, keep: tl.pointer_type, units: tl.pointer_type,
    row_stats: tl.pointer_type, counter: tl.pointer_type, query_strides: tl.tuple, key_strides: tl.tuple,
    keep_stride: tl.tensor, rows: tl.tensor, columns: tl.tensor, padded: tl.tensor, steps: tl.tensor,
    config: UnitsConfig,
):  # fmt: skip
    """Stores the units, and sets the counters of the next launch to 0. steps: W / STEP."""
    width = steps * config.STEP
    if tl.program_id(1) == 0:
        scale_rows(query, query_strides, keep, keep_stride, units, row_stats, rows, columns, padded, width, config)
        tl.store(counter + tl.program_id(0), 0)
    else:
        out = units + padded.to(tl.int64) * width
        scale_rows(key, key_strides, keep, keep_stride, out, row_stats + padded, rows, columns, padded, width, config)


UNITS = Kernel(info_nce_units_kernel)

# ---- host


def plain_plan(kernel, dtypes, grid, values, arch):
    """The plan of a kernel whose tensors are all plain pointers. dtypes: in the kernel's order."""
    nothing, dtypes = Group((), ()), dict(zip(kernel.pointers, dtypes))
    values = {"VEC": 1, **values}
    return Plan(kernel, (), dtypes, nothing, nothing, (), 1, values, grid=grid, wide=False, arch=arch)


def launch(kernel, make, tensors, *numbers, key=()):
    """Launches a kernel. make(tensors, arch) returns its plan."""
    result, addresses = traits(tensors)

    def build(arch):
        check_operands(kernel.fn.__name__, *tensors)
        return make(tensors, arch)

    cached_plan((id(kernel), key, result), build, tensors[0].device)(tensors, addresses, *numbers)


def dtypes_of(tensors):
    return [None if x is None else x.dtype for x in tensors]


def padded_shape(rows, columns):
    """(P, W) for `rows` vectors of `columns` numbers."""
    width = triton.next_power_of_2(columns) if columns <= WHOLE else triton.cdiv(columns, STEP) * STEP
    return triton.cdiv(rows, TILE) * TILE, max(width, STEP)


def stride_of(keep):
    return 0 if keep is None else keep.stride(0)


def row_tiling(width, columns, vec):
    """Constants and numbers of the kernels that read rows. vec: numbers that are read at once."""
    wide = triton.next_power_of_2(width)
    return {
        "columns": columns // vec,
        "steps": width // STEP,
        "STEP": STEP,
        "BM": ROW_TILE // wide,
        "BN": wide,
        "VEC": vec,
    }


def vector(columns, *tensors):
    """VEC for these rows of halves: 8 if all are contiguous, 16-byte aligned and a multiple of 8 long, else 1."""
    fits = all(x.stride(1) == 1 and not x.stride(0) % 8 and not x.data_ptr() % 16 for x in tensors)
    return 8 if fits and not columns % 8 else 1


def units_plan(tensors, arch):
    query, key, keep, units, row_stats, _ = tensors
    (rows, columns), (_, padded, width) = query.shape, units.shape
    vec = vector(columns, query, key)
    (q_row, q), (k_row, k) = query.stride(), key.stride()
    values = {
        "query_strides": (q_row // vec, q), "key_strides": (k_row // vec, k), "keep_stride": stride_of(keep),
        "rows": rows, "padded": padded, **row_tiling(width, columns, vec),
    }  # fmt: skip
    return plain_plan(UNITS, dtypes_of(tensors), (padded // values["BM"], 2), values, arch)

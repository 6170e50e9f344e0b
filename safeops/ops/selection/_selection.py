"""Parts of all selection ops: the dtypes they move, stand-ins in any dtype, indices, and their checks."""

import torch

from safeops.core import check
from safeops.core.dtypes import FLOATING, fill_of, filled, signed, where
from safeops.core.symbolic import symbolic

# The kernels move these by bit pattern. Other dtypes take the composite.
_NAMES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
MOVABLE = frozenset(getattr(torch, name) for name in _NAMES.split())
MOST_DIMS = 63  # the kernels see elements of 16 bytes as a dim of two halves
INDEX = (torch.int32, torch.int64)

# ---- definitions


def full(x, shape, fill_value):
    """`fill_value` everywhere, in x's dtype; attached to x, which has no elements to be read."""
    result = filled(x, shape, fill_of(fill_value, x.dtype))
    return result - x.sum().to(x.dtype) if x.is_floating_point() or x.is_complex() else result


def summed_wide(x):
    """x in the dtype its gradient is summed in: duplicates add up. (Of unsigned integers CUDA indexes only bytes.)"""
    if x.dtype not in FLOATING:
        return signed(x)
    # aten adds one after the other on the CPU
    return x.to(torch.float64 if x.device.type == "cpu" or x.dtype == torch.float64 else torch.float32)


def select_rows(rows, index, fill_value):
    """rows[index] along the first dim, `fill_value` where the index is out of range."""
    shape = (*index.shape, *rows.shape[1:])
    if rows.shape[0] == 0:
        return full(rows, shape, fill_value)
    valid = (index >= 0) & (index < rows.shape[0])
    # advanced indexing: its backward adds duplicates in a fixed order, on CUDA too
    taken = summed_wide(rows)[torch.where(valid, index, 0).long()].to(rows.dtype)
    fill = filled(rows, (), fill_of(fill_value, rows.dtype))
    return where(valid.reshape(*index.shape, *(1,) * (rows.dim() - 1)), taken, fill)


def as_double(fill_value):
    """The number as the kernels take it, or None: an integer beyond 2^53 that a double does not hold."""
    if symbolic(fill_value):  # what it is now is not to be asked
        return fill_value
    double = float(fill_value)
    return double if double == fill_value or fill_value != fill_value else None


# ---- checks


def check_movable(function, name, x):
    check.tensor(function, name, x)
    check.dimensions(function, name, x, MOST_DIMS)
    if x.dtype not in MOVABLE:
        raise TypeError(
            f"{function}: {name} must be bool, integer, floating or complex of 16 bits at least, got {x.dtype}"
        )


def check_fill(function, fill_value, dtype):
    if dtype == torch.bool and isinstance(fill_value, bool):
        return
    check.number(function, "fill_value", fill_value)
    check.exists(function, "fill_value", fill_value, dtype)


def check_index(function, index):
    check.tensor(function, "index", index)
    if index.dtype not in INDEX:
        raise TypeError(f"{function}: index must be an int32 or int64 tensor, got {index.dtype}")


def check_dim(function, dim, ndim):
    """dim as a non-negative int."""
    return check.one_dim(function, dim, ndim)

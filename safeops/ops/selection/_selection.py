"""Shared by the selection ops: the dtypes that kernels move, fill values, selection of rows by index, and checks."""

import torch

from safeops.core import check
from safeops.core.dtypes import FLOATING, fill_of, filled, signed, where
from safeops.core.symbolic import symbolic

# The kernels move the bits of these dtypes. For other dtypes the composite (torch ops) runs.
_NAMES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
MOVABLE = frozenset(getattr(torch, name) for name in _NAMES.split())
MOST_DIMS = 63  # not 64: the kernels read 16-byte elements as two 8-byte elements, along one more dim
INDEX = (torch.int32, torch.int64)

# ---- definitions


def full(x, shape, fill_value):
    """A tensor of `fill_value` in x's dtype, attached to x's graph. x has no elements."""
    result = filled(x, shape, fill_of(fill_value, x.dtype))
    return result - x.sum().to(x.dtype) if x.is_floating_point() or x.is_complex() else result


def summed_wide(x):
    """x in the dtype that sums the gradients of duplicates. (Unsigned becomes signed: CUDA indexes few unsigned.)"""
    if x.dtype not in FLOATING:
        return signed(x)
    # fp64 on the CPU: there aten adds terms one by one, and in fp32 the error grows like their number
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
    """The fill value as the double that kernels take. None for an integer that a double cannot hold exactly."""
    if symbolic(fill_value):  # its value must not be read
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

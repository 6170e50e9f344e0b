"""Parts of a launcher: the traits of its tensors that a plan depends on, their common shape, and outputs like them."""

import torch

from .buffers import empty
from .kernel import POINTER


def traits(tensors):
    """Returns (everything in these tensors that a plan may depend on, their addresses)."""
    results, addresses = [], []
    for x in tensors:
        if x is None:
            results.append(None)
            addresses.append(0)
        else:
            address = x.data_ptr()
            results += x.shape, x.stride(), x.dtype, x.get_device(), address % 16
            addresses.append(address)
    return tuple(results), addresses


def check_operands(name, first, *others):
    """Checks devices and dtypes for memory safety only: the Python layer has already reported a user's mistakes."""
    for tensor in (first, *others):
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name}: operands on {first.device} and {tensor.device}")
        if tensor is not None and tensor.dtype not in POINTER:
            raise TypeError(f"{name}: dtype {tensor.dtype} is not supported")


def like(tensor, shape, dtype):
    """An empty output: in the tensor's own memory order if the tensor has this shape, else contiguous."""
    if tensor.shape == shape:
        return torch.empty_like(tensor, dtype=dtype)
    return empty(shape, dtype, tensor.device)


def common_shape(first, *others):
    """The shape that all tensors broadcast to. They nearly always have one shape; torch.broadcast_shapes takes 5 us."""
    shape = first.shape
    for x in others:
        if x.shape != shape:
            shape = broadcast_shape(shape, x.shape)
    return shape


def broadcast_shape(a, b):
    """The shape that the shapes a and b broadcast to. Sizes may be symbols (trace.py)."""
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    if any(m != n and m != 1 and n != 1 for m, n in zip(a[lead:], b)):
        raise ValueError(f"shapes {tuple(a)} and {tuple(b)} do not broadcast")
    return (*a[:lead], *(n if m == 1 else m for m, n in zip(a[lead:], b)))

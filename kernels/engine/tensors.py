"""The tensors that a launcher gets: what a plan depends on in them, their shape in common, and outputs like them."""

import torch

from .buffers import empty
from .kernel import POINTER


def traits(tensors):
    """(all that a plan may depend on in these tensors, their addresses)"""
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
    """Memory safety only; the Python layer has already reported what a user can get wrong."""
    for tensor in (first, *others):
        if tensor is not None and tensor.device != first.device:
            raise ValueError(f"{name}: operands on {first.device} and {tensor.device}")
        if tensor is not None and tensor.dtype not in POINTER:
            raise TypeError(f"{name}: dtype {tensor.dtype} is not supported")


def like(tensor, shape, dtype):
    """An output in the tensor's own memory order where it has the full shape, else contiguous."""
    if tensor.shape == shape:
        return torch.empty_like(tensor, dtype=dtype)
    return empty(shape, dtype, tensor.device)


def common_shape(first, *others):
    """torch.broadcast_shapes takes 5 us, and nearly always says what was known."""
    shape = first.shape
    for x in others:
        if x.shape != shape:
            shape = broadcast_shape(shape, x.shape)
    return shape


def broadcast_shape(a, b):
    """The shape that two broadcast to; of sizes that may be symbols (trace.py)."""
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    if any(m != n and m != 1 and n != 1 for m, n in zip(a[lead:], b)):
        raise ValueError(f"shapes {tuple(a)} and {tuple(b)} do not broadcast")
    return (*a[:lead], *(n if m == 1 else m for m, n in zip(a[lead:], b)))

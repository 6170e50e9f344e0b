"""The losses of a step: the tensors whose backward is called."""

import contextlib
import functools

import torch


@contextlib.contextmanager
def collecting(losses):
    """Append to `losses` each tensor whose backward is called inside."""
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def collected(tensors, *args, **kwargs):
        losses.extend(x.detach() for x in ([tensors] if isinstance(tensors, torch.Tensor) else tensors))
        return backward(tensors, *args, **kwargs)

    torch.autograd.backward = collected
    try:
        yield
    finally:
        torch.autograd.backward = backward

"""The losses of a step: the tensors whose backward is called."""

import contextlib
import functools
import threading

import torch

_open = []  # (thread, list of its losses) of the steps that run now
_lock = threading.Lock()
_original = torch.autograd.backward  # what `_collected` calls
_is_installed = False  # True while `_collected` is in its place, or another library's wrapper around that


@functools.wraps(torch.autograd.backward)
def _collected(tensors, *args, **kwargs):
    if torch.compiler.is_compiling():  # Dynamo ends its graph here, and calls this function again
        return _original(tensors, *args, **kwargs)
    # (a GradientEdge is a tuple, but not one of tensors)
    roots = tensors if isinstance(tensors, torch.Tensor) or hasattr(tensors, "_fields") else tuple(tensors)
    thread = threading.get_ident()
    for x in roots if type(roots) is tuple else (roots,):
        # A root of several elements comes with its gradient, as a part of a model: it may hold -inf where that is 0.
        if isinstance(x, torch.Tensor) and x.numel() == 1:
            for owner, losses in _open:
                if owner == thread:
                    losses.append(x.detach())
    return _original(roots, *args, **kwargs)


@contextlib.contextmanager
def collecting(losses):
    """Append to `losses` each tensor whose backward this thread calls inside."""
    global _original, _is_installed
    entry = threading.get_ident(), losses
    with _lock:
        _open.append(entry)
        if not _is_installed or torch.autograd.backward is _original:
            _original, torch.autograd.backward, _is_installed = torch.autograd.backward, _collected, True
    try:
        yield
    finally:
        with _lock:
            _open[:] = [x for x in _open if x is not entry]
            if not _open and torch.autograd.backward is _collected:
                torch.autograd.backward, _is_installed = _original, False

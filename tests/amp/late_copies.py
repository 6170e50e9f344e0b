"""A pretended GPU: copies to it take place late, when `arrive()` is called, as asynchronous copies may.

This models a real GPU: a copy from pinned memory reads it some time after the call has returned; the allocator keeps
pinned memory as long as a copy from it is pending (here the queue holds it); streams order copies, and a reader on
another stream must wait for them. It does not model memory that is reused. tests/gpu tests the real one.
"""

import contextlib
import types

import torch
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)


class Arrival(torch.Tensor):
    """A tensor that says it is on the GPU, where a copy arrives late."""

    recorded = None

    @property
    def device(self):
        return GPU

    def record_stream(self, stream):
        self.recorded = stream


class Stream:
    device = GPU

    def __init__(self, name):
        self.name, self.waits_for = name, []

    def wait_stream(self, other):
        self.waits_for.append(other)


class LateCopies(TorchFunctionMode):
    def __init__(self, monkeypatch):
        super().__init__()
        self.queue, self.pinned, self.current = [], {}, Stream("current")
        cuda = types.SimpleNamespace(
            is_available=lambda: True,
            Stream=Stream,
            current_device=lambda: 0,
            current_stream=lambda device=None: self.current,
            stream=self._on,
        )
        monkeypatch.setattr(torch, "cuda", cuda)

    @contextlib.contextmanager
    def _on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def pin(self, x):
        self.pinned[id(x)] = x
        return x

    def arrive(self):
        with torch._C.DisableTorchFunction():
            for target, source, _ in self.queue:
                target.copy_(source)
        self.queue.clear()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and GPU in args[1:2]:
            return self._copy(args[0], **kwargs)
        if func is torch.Tensor.is_pinned:
            return id(args[0]) in self.pinned
        if func is torch.empty_like and kwargs.pop("pin_memory", False):
            return self.pin(func(*args, **kwargs))
        return func(*args, **kwargs)

    def _copy(self, x, non_blocking=False):
        with torch._C.DisableTorchFunction():
            target = torch.full_like(x, 99).as_subclass(Arrival)
            if id(x) in self.pinned and non_blocking:
                self.queue.append((target, x, self.current))
            else:
                target.copy_(x)  # the driver has read pageable memory when the call returns
            return target

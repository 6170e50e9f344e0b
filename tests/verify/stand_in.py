"""Ops that compute 3 x by a Python kernel on the CPU. The kernels are wrong, raise, wait and so on."""

import contextlib

import torch

from safeops.core.library import declare_raw, lib
from safeops.core.op import Op, registry


def right(x):
    return x * 3


def wrong(x):
    return x * 3.01


def wrong_at_the_end(x):
    """Is wrong only in tensors so large that a GPU would run a second wave of blocks."""
    out = x * 3
    if out.numel() > 60_000:
        out.view(-1)[-1] += 1
    return out


def hides_nan(x):
    return (x * 3).nan_to_num(0.0)


def flat(x):
    """Is wrong for strided operands: it reads them as if they were contiguous."""
    return torch.as_strided(x, x.shape, torch.empty(x.shape).stride()) * 3


def waits(x):
    x.sum().item()
    return x * 3


def differs(x):
    ulp = torch.finfo(x.dtype).eps if x.dtype == torch.float32 else 0
    return x * 3 * (1 + ulp * torch.randint(0, 2, x.shape, dtype=x.dtype))


def raises(x):
    raise RuntimeError("CUDA error: no kernel image")


def runs_out(x):
    raise torch.OutOfMemoryError("CUDA out of memory")


KERNELS = {f.__name__: f for f in (right, wrong, wrong_at_the_end, hides_nan, flat, waits, differs, raises, runs_out)}


class StandIn(Op):
    __module__ = "safeops.ops.elementwise.stand_in"
    owner = "C++/CUDA"
    takes = True

    def prepare(self, input):
        return self.takes, (input,)

    def validate(self, input):
        pass

    def gradients(self, grad, needs, operands, results):
        return [self.backward(grad, operands[0])]


def _declare(name, schema):
    raw = declare_raw(name, schema, fake=lambda x, *_: torch.empty_like(x), composite=lambda x, *_: x * 3)
    lib.impl(name, lambda x, *_: KERNELS[name.removeprefix("_stand_in_").removesuffix("_backward")](x), "CPU")
    return raw


_RAW = {
    name: (
        _declare(f"_stand_in_{name}", "(Tensor input) -> Tensor"),
        _declare(f"_stand_in_{name}_backward", "(Tensor grad, Tensor input) -> Tensor"),
    )
    for name in KERNELS
}


@contextlib.contextmanager
def stand_in(name):
    """Returns a context in which the op of this name is registered."""
    op = StandIn(f"stand_in_{name}", *_RAW[name], lambda x: x * 3)

    def function(input):
        return op.call(input)

    function.__module__ = StandIn.__module__  # it gives the op its family
    op.public_function = function
    try:
        yield op
    finally:
        del registry[op.name]

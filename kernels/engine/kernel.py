"""How a kernel is declared: a jit function whose annotations are its launch data, for the launchers, the interpreter's
tests and the ahead-of-time check."""

import types
from dataclasses import dataclass
from itertools import chain

import torch
import triton
import triton.language as tl

from .operand import Operand

POINTER = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
COMPUTE = {torch.float32: tl.float32, torch.float64: tl.float64}


@dataclass(frozen=True)
class Config:
    threads: int = 256
    tile_bytes: int = 8192  # a tile's bytes in the narrowest data operand: two 16-byte accesses per thread and operand
    max_registers: tuple = (None, None)  # limits for (variant with vector accesses, general variant)

    def tile(self, itemsize, vec, tensors):
        """The number of elements of a tile; half of it if more than three operands are accessed element by element,
        since their addresses take registers."""
        crowded = vec == 1 and sum(t is not None for t in tensors) > 3
        return self.tile_bytes // itemsize // (2 if crowded else 1)


class Kernel:
    """A jit function. The annotations of its parameters say what they are:

    Operand            a tensor; operands come first
    tl.pointer_type    an address alone, such as that of a workspace
    tl.float64         a number, or a tuple; the plan's value of this name is the tuple's length
    tl.tensor          an integer, such as an index or a count
    tl.tuple           several indices, such as strides
    other NamedTuples  their fields are filled in by the plan (operand.py); the last, `config`, has the constants"""

    def __init__(self, fn, configs=None):
        self.fn, self.configs = fn, configs or {None: Config()}  # by architecture; None for all others
        self.parameters = tuple(fn.fn.__annotations__.items())
        self.operands = self.named(Operand)
        self.pointers = self.operands + self.named(tl.pointer_type)
        self.indices = {name: fields(name, kind) for name, kind in self.parameters
                        if kind not in (Operand, tl.pointer_type, tl.float64)}  # fmt: skip
        self.constants = self.indices.pop("config")
        self.values = [*self.constants, *chain(*self.indices.values()), *self.named(tl.float64)]
        if tuple(fn.arg_names) != tuple(fn.fn.__annotations__) or self.operands != fn.arg_names[: len(self.operands)]:
            raise TypeError(f"{fn.__name__} takes {fn.arg_names}, of which operands come first: {self.operands}")
        KERNELS.append(self)

    def named(self, kind):
        return [name for name, annotation in self.parameters if annotation is kind]

    def config(self, arch=None):
        return self.configs.get(arch, self.configs[None])


KERNELS = []


def fields(name, kind):
    """The names that the plan fills in for a parameter: its fields without a default, or its own name."""
    return [field for field in getattr(kind, "_fields", (name,)) if field not in getattr(kind, "_field_defaults", ())]


def hash_callees_first(fn):
    """Have Triton hash the functions that a jit function calls before the function itself.

    A function's hash covers the global constants of the functions that it calls, but only if those have a hash already.
    In another order a kernel's key in the cache on disk would depend on what the process has compiled before."""
    if fn.hash is None:
        for name in _names(fn.fn.__code__):
            called = fn.fn.__globals__.get(name)
            if isinstance(called, triton.JITFunction) and called is not fn:
                hash_callees_first(called)
        fn.cache_key  # noqa: B018 (which keeps it)


def _names(code):
    """Names that a function's code looks up, in its body and in those of its comprehensions."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return {*code.co_names, *(name for each in inner for name in _names(each))}

"""How a kernel is declared: a jit function together with its launch data, in one table that the launchers, the
interpreter's tests and the ahead-of-time check all read."""

import types
from dataclasses import dataclass, field
from functools import cached_property

import torch
import triton
import triton.language as tl

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
    tile_bytes: int = 8192  # of the narrowest data operand: two 16-byte accesses per thread and operand
    max_registers: tuple = (None, None)  # of the variant with vector accesses, of the general one

    def tile(self, itemsize, vec, tensors):
        """Elements of a tile; half for single-element accesses to many operands, whose addresses take registers too."""
        crowded = vec == 1 and sum(t is not None for t in tensors) > 3
        return self.tile_bytes // itemsize // (2 if crowded else 1)


@dataclass(frozen=True)
class Kernel:
    """Arguments come in this order: pointers, floats, outer_shape, inner_shape, <operand>_outer and <operand>_inner,
    other tuples of indices, indices, constants. An operand's kind is the constant of its name. Floats are fp64; the one
    named "parameters" is a tuple of as many as the plan's value of this name says."""

    fn: object
    pointers: tuple
    floats: tuple
    operands: tuple
    tuples: tuple
    indices: tuple
    constants: tuple
    configs: dict = field(default_factory=lambda: {None: Config()})  # by architecture; None for all others

    def __post_init__(self):
        declared = (*self.pointers, *self.floats, *self.tail)
        if tuple(self.fn.arg_names) != declared:
            raise TypeError(f"{self.fn.__name__} takes {self.fn.arg_names}, declared are {declared}")
        KERNELS[self.fn.__name__] = self

    @cached_property
    def all_tuples(self):
        strides = (f"{name}_{group}" for name in self.operands for group in ("outer", "inner"))
        return ("outer_shape", "inner_shape", *strides, *self.tuples)

    @cached_property
    def tail(self):
        """The arguments that a plan fills in."""
        return (*self.all_tuples, *self.indices, *self.constants)

    @cached_property
    def operand_names(self):
        """Of each operand: its name, and those of its strides and its kind."""
        return [(name, f"{name}_outer", f"{name}_inner", name.upper()) for name in self.operands]

    def config(self, arch=None):
        return self.configs.get(arch, self.configs[None])


KERNELS = {}


def settle(fn):
    """Have Triton hash the functions that a jit function calls before the function itself.

    The hash holds the global constants of those functions, but not of one that has no hash yet: a kernel's key in the
    cache on disk would depend on what the process has compiled before."""
    if fn.hash is None:
        for name in _names(fn.fn.__code__):
            called = fn.fn.__globals__.get(name)
            if isinstance(called, triton.JITFunction) and called is not fn:
                settle(called)
        fn.cache_key  # noqa: B018 (which keeps it)


def _names(code):
    """What a function's code looks up, in its own body and in those of its comprehensions."""
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return {*code.co_names, *(name for each in inner for name in _names(each))}

"""How a kernel is compiled and launched.

A `Plan` is one specialisation of a `Kernel`: argument types, constants and grid. The launcher, the interpreter tests
and the ahead-of-time check all go through `Plan`: what is checked without a GPU is what runs on one. There is no
autotuning, and a kernel is compiled for what its plan says and nothing else, so that a new shape seldom compiles a new
one.
"""

import threading
from array import array
from functools import cached_property
from itertools import chain

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .buffers import empty
from .indexing import LINE, VECTOR
from .kernel import POINTER, settle
from .start import starter
from .trace import active


class Plan:
    """One specialisation of a kernel, with everything but the pointers and the floats filled in.

    tensors: the operands; dtypes: of the other pointers, None for an absent one; values: by argument name."""

    index = None  # of the GPU; None: interpreted

    def __init__(self, kernel, tensors, dtypes, outer, inner, kinds, vec, values, *, grid, wide, arch):
        self.kernel, self.grid, self.config = kernel, (*grid, 1), kernel.config(arch)
        self.kinds, self.vec, self.wide = kinds, vec, wide
        self.dtypes, self.values = dict(dtypes), dict(values, outer_shape=outer.shape, inner_shape=inner.shape)
        names = kernel.operand_names
        for (name, *three), tensor, kind, o, i in zip(names, tensors, kinds, outer.strides, inner.strides):
            self.dtypes[name] = None if tensor is None else tensor.dtype
            self.values.update(zip(three, (o, i, kind.value)))
        self.whole = inner.numel % vec == 0
        self.tail = tuple(map(self.values.__getitem__, kernel.tail))
        self.start = None

    # What is compiled. It is made when it is asked for: most plans find their binary by `variant`.

    @cached_property
    def attrs(self):
        names, found = self.kernel.fn.arg_names, {}
        for name, kind in zip(self.kernel.operands, self.kinds):
            if kind is VECTOR or kind is LINE:  # aligned, and so are its rows, and those of every batch
                found[(names.index(name),)] = [["tt.divisibility", 16]]
                for steps in (f"{name}_outer", f"{name}_batch"):
                    for d in range(len(self.values[steps]) if steps in names else 0):
                        found[names.index(steps), d] = [["tt.divisibility", self.vec]]
        if self.whole:
            found[(names.index("N"),)] = [["tt.divisibility", self.vec]]
        return found

    @cached_property
    def signature(self):
        kernel, values, index = self.kernel, self.values, "i64" if self.wide else "i32"
        found = {name: self.dtypes[name] and POINTER[self.dtypes[name]] for name in kernel.pointers}
        found |= dict.fromkeys(kernel.floats, "fp64")
        if "parameters" in kernel.floats:
            found["parameters"] = ("fp64",) * values["parameters"]
        found |= {name: values[name] and (index,) * len(values[name]) for name in kernel.all_tuples}
        found |= dict.fromkeys(kernel.indices, index) | dict.fromkeys(kernel.constants, None)
        return {name: "constexpr" if kind is None else kind for name, kind in found.items()}

    @cached_property
    def constants(self):
        return {name: self.values.get(name) for name, kind in self.signature.items() if kind == "constexpr"}

    def variant(self):
        """All that signature, constants and attributes are made of: equal for plans that differ in sizes alone."""
        kernel, values, dtypes = self.kernel, self.values, self.dtypes
        lengths = [
            None if (v := values[name]) is None else len(v) for name in ("outer_shape", "inner_shape", *kernel.tuples)
        ]
        # functions by their address: Triton hashes one by its source, which takes 1 us each time
        constants = [id(v) if callable(v) else v for v in map(values.__getitem__, kernel.constants)]
        return (id(kernel), self.config, self.wide, self.whole, values.get("parameters"), *lengths, *constants,
                *map(dtypes.__getitem__, kernel.pointers))  # fmt: skip

    def source(self):
        for fn in (self.kernel.fn, *self.constants.values()):
            if isinstance(fn, triton.JITFunction):
                settle(fn)
        return ASTSource(self.kernel.fn, self.signature, self.constants, self.attrs)

    def options(self, target):
        """(Products are fused with additions, whatever a release of Triton does by itself.)"""
        options = {"num_warps": self.config.threads // target.warp_size, "enable_fp_fusion": True}
        registers = self.config.max_registers[self.constants["VEC"] == 1]
        if registers and target.backend == "cuda":
            # A functor whose arithmetic would spill says how many it needs: before sm_100, and from there on.
            needed = getattr(self.constants.get("F"), "max_registers", (0, 0))
            options["maxnreg"] = max(registers, needed[target.arch >= 100])
        return options

    def compile(self, target):
        return triton.compile(self.source(), target=target, options=self.options(target))

    def loaded(self, index):
        """(what is compiled, how it is started), once for all plans that differ in sizes alone: new shapes must not
        load ever more."""
        key = index, self.variant()
        found = _binaries.get(key)
        if found is None:
            if torch.cuda.is_current_stream_capturing():  # to load may synchronise, which would break the capture
                raise RuntimeError(
                    f"safeops: {self.kernel.fn.__name__} is new for these dtypes and layouts, and cannot be compiled "
                    "and loaded while a CUDA graph is captured: run the step once before, or safeops.warmup"
                )
            with _locks.setdefault(key, threading.Lock()):  # who comes second waits for the first one's
                found = _binaries.get(key)
                if found is None:
                    compiled = self.compile(gpu_target(index))
                    # (the values too: what the key knows by its address must live as long as the key)
                    found = _binaries[key] = compiled, starter(compiled, index), self.values
        return found[:2]

    # What a call does.

    @property
    def numbers(self):
        """All arguments after the floats that are no constants, and two addresses of scratch memory."""
        tuples, indices = len(self.kernel.all_tuples), len(self.kernel.indices)
        return *chain.from_iterable(filter(None, self.tail[:tuples])), *self.tail[tuples : tuples + indices], 0, 0

    @cached_property
    def words(self):
        """(places of the pointers that there are, the numbers as the driver takes them, whether blocks share a
        result)."""
        present = [i for i, name in enumerate(self.kernel.pointers) if self.dtypes[name] is not None]
        return present, array("q", self.numbers).tobytes(), self.values.get("SPLIT", False)

    def __call__(self, tensors, addresses, *floats):
        """Launch on the current stream of the plan's device, in the interpreter if the tensors are on the CPU.
        tensors: all pointers; addresses: those of the first of them."""
        if active.tape is not None:
            active.tape.plans.append(self)
        elif self.index is None:
            self.kernel.fn[self.grid](*tensors, *floats, *self.tail)
        elif torch.cuda.current_device() == self.index:
            start = self.start
            if start is None:
                start = self.start = self.loaded(self.index)[1]
            made = [0 if t is None else t.data_ptr() for t in tensors[len(addresses) :]]
            start(self, (*addresses, *made), floats)
        else:
            with torch.cuda.device(self.index):
                self(tensors, addresses, *floats)


_binaries, _locks = {}, {}


def gpu_target(index):
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return GPUTarget("hip", properties.gcnArchName.split(":")[0], 64)
    return GPUTarget("cuda", properties.major * 10 + properties.minor, 32)


def gpu_index(device):
    """The place of a GPU among them; None on the CPU, where kernels are interpreted."""
    return device.index


_arch = {}


def arch_of(device):
    """The key of Kernel.configs; None on the CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return None
    if device.index not in _arch:
        _arch[device.index] = gpu_target(device.index).arch
    return _arch[device.index]


_plans = {}
PLANS = 4096  # forgotten all together when full: a program that needs more has ever new shapes


def cached_plan(key, build, device):
    """The plan of this key, which build(architecture) makes."""
    plan = None if active.tape else _plans.get(key)
    if plan is None:
        if len(_plans) >= PLANS:
            _plans.clear()
        plan = build(arch_of(device))
        plan.index = gpu_index(device)
        if not active.tape:
            _plans[key] = plan
    return plan


def traits(tensors):
    """(all that a plan may depend on in these tensors, their addresses)"""
    found, addresses = [], []
    for x in tensors:
        if x is None:
            found.append(None)
            addresses.append(0)
        else:
            address = x.data_ptr()
            found += x.shape, x.stride(), x.dtype, x.get_device(), address % 16
            addresses.append(address)
    return tuple(found), addresses


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
    """Of two; of sizes that may be symbols (trace.py)."""
    if len(a) < len(b):
        a, b = b, a
    lead = len(a) - len(b)
    if any(m != n and m != 1 and n != 1 for m, n in zip(a[lead:], b)):
        raise ValueError(f"shapes {tuple(a)} and {tuple(b)} do not broadcast")
    return (*a[:lead], *(n if m == 1 else m for m, n in zip(a[lead:], b)))

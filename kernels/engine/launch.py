"""How a kernel is compiled and launched.

A `Plan` is one specialisation of a `Kernel`: argument types, constants and grid. The launcher, the interpreter tests
and the ahead-of-time check all go through `Plan`: what is checked without a GPU is what runs on one. There is no
autotuning. A kernel is compiled for what its plan says and nothing else, so that a new shape seldom compiles a new
kernel.
"""

import threading
from array import array
from functools import cached_property
from itertools import chain
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .buffers import PARTIALS
from .indexing import LINE, VECTOR, Group
from .kernel import POINTER, hash_callees_first
from .operand import Operand, Space, is_constant, leaves, map_leaves
from .start import flat, starter
from .trace import active

ALIGNED = (VECTOR.value, LINE.value)


class Plan:
    """One specialisation of a kernel, with everything but the pointers and the floats filled in.

    tensors: the operands. dtypes: {name: dtype} of the other pointers, None if absent. values: {name: value} of
    parameters and tuple fields. batch: the dimensions in neither the outer nor the inner group; a block has one index
    of it."""

    index = None  # index of the GPU; None: the interpreter runs the kernel
    workspace = 0  # size in fp64 numbers: partial results of blocks that share a result
    counters = 0  # how many counters these blocks use, at most buffers.COUNTERS

    def __init__(self, kernel, tensors, dtypes, outer, inner, kinds, vec, values, *, grid, wide, arch, batch=None):
        self.kernel, self.grid, self.config = kernel, (*grid, 1), kernel.config(arch)
        self.vec, self.wide, self.in_vectors = vec, wide, inner.numel % vec == 0
        batch = batch or Group((), ((),) * len(tensors))
        self.dtypes, self.kinds, self.strides = dict(dtypes), {}, {}
        operands = zip(kernel.operands, tensors, kinds, outer.strides, inner.strides, batch.strides)
        for name, tensor, kind, *strides in operands:
            self.dtypes[name] = None if tensor is None else tensor.dtype
            self.kinds[name], self.strides[name] = kind.value, strides
        self.shapes = batch.shape, outer.shape, inner.shape
        values = dict(values, outer_shape=outer.shape, inner_shape=inner.shape, batch_shape=batch.shape)
        self.values = {name: values[name] for name in kernel.values if name in values}
        self.constants = {name: self.values[name] for name in kernel.constants}
        self.present = [i for i, name in enumerate(kernel.pointers) if self.dtypes[name] is not None]
        self.start = None

    @cached_property
    def template(self):
        """The kernel's arguments: numbers, constants, and Triton's type in place of each pointer and each float."""
        return [self._argument(name, annotation) for name, annotation in self.kernel.parameters]

    def _argument(self, name, annotation):
        if annotation in (tl.tensor, tl.tuple):
            return self.values[name]
        if annotation is tl.float64:
            return ("fp64",) * self.values[name] if name in self.values else "fp64"
        if annotation is Operand or annotation is tl.pointer_type:
            pointer = self.dtypes[name] and POINTER[self.dtypes[name]]
            if pointer is None or annotation is not Operand:
                return pointer
            constants = self.kinds[name], self.kernel.operands.index(name)
            return Operand(pointer, *self.strides[name], *map(tl.constexpr, constants))
        if name == "config":
            return annotation(*[None if x is None else tl.constexpr(x) for x in self.constants.values()])
        return annotation(*map(self.values.get, self.kernel.indices[name]))

    # Inputs of the compiler, made on demand: most plans find a compiled binary by their `variant`.

    @cached_property
    def attrs(self):
        results = {}
        for i, (name, annotation) in enumerate(self.kernel.parameters):
            if self.kinds.get(name) in ALIGNED:  # its rows and batches begin at multiples of 16 bytes, too
                results[i, Operand._fields.index("pointer")] = [["tt.divisibility", 16]]
                for field in map(Operand._fields.index, ("outer", "batch")):
                    for d in range(len(self.template[i][field])):
                        results[i, field, d] = [["tt.divisibility", self.vec]]
            if annotation is Space and self.in_vectors:
                results[i, Space._fields.index("N")] = [["tt.divisibility", self.vec]]
        return results

    @cached_property
    def signature(self):
        index = "i64" if self.wide else "i32"

        def kind(leaf):
            return leaf if isinstance(leaf, str) else "constexpr" if is_constant(leaf) else index

        return {name: map_leaves(kind, x) for (name, _), x in zip(self.kernel.parameters, self.template)}

    def variant(self):
        """All that the signature, constants and attributes depend on: equal for plans that differ in sizes alone."""
        lengths = [len(x) for x in self.values.values() if isinstance(x, tuple)]
        # functions count by their address: Triton's hash of a function's source takes 1 us each time
        constants = [id(x) if callable(x) else x for x in self.constants.values()]
        kinds, dtypes = self.kinds.values(), map(self.dtypes.__getitem__, self.kernel.pointers)
        parameters = self.values.get("parameters")
        key = id(self.kernel), self.config, self.wide, self.in_vectors, parameters
        return *key, *lengths, *constants, *kinds, *dtypes

    def source(self):
        for fn in (self.kernel.fn, *self.constants.values()):
            if isinstance(fn, triton.JITFunction):
                hash_callees_first(fn)
        constants = {path: getattr(x, "value", x) for path, x in leaves(self.template) if is_constant(x)}
        return ASTSource(self.kernel.fn, self.signature, constants, self.attrs)

    def options(self, target):
        """The compiler's options. enable_fp_fusion is set because its default depends on the release of Triton."""
        options = {"num_warps": max(self.config.threads // target.warp_size, 1), "enable_fp_fusion": True}
        registers = self.config.max_registers[self.constants["VEC"] == 1]
        if registers and target.backend == "cuda":
            # F.max_registers = (before sm_100, from sm_100 on): the fewest with which the functor F does not spill.
            of_functor = getattr(self.constants.get("F"), "max_registers", (0, 0))
            options["maxnreg"] = max(registers, of_functor[target.arch >= 100])
        return options

    def compile(self, target):
        return triton.compile(self.source(), target=target, options=self.options(target))

    def loaded(self, index):
        """Returns (compiled kernel, its start function). Plans that differ in sizes alone share them, so that new
        shapes do not load ever more kernels."""
        key = index, self.variant()
        result = _binaries.get(key)
        if result is None:
            if torch.cuda.is_current_stream_capturing():  # loading may synchronise, which would break the capture
                raise RuntimeError(
                    f"safeops: {self.kernel.fn.__name__} is new for these dtypes and layouts, and cannot be compiled "
                    "and loaded while a CUDA graph is captured: run the step once before, or safeops.warmup"
                )
            with _locks.setdefault(key, threading.Lock()):  # a second thread waits for the first to compile
                result = _binaries.get(key)
                if result is None:
                    binary = self.compile(gpu_target(index))
                    # (self.values is kept, too: the key has functions by address, which no other function may get)
                    result = _binaries[key] = binary, starter(binary, index, self.places), self.values
        return result[:2]

    # Code that runs at each call.

    def arguments(self, pointers, floats):
        """The kernel's arguments. pointers: tensors or addresses, in the order of kernel.pointers. floats: numbers."""
        pointers, numbers = iter([pointers[i] for i in self.present]), flat(floats)

        def value(leaf):
            return next(numbers if leaf == "fp64" else pointers) if isinstance(leaf, str) else leaf

        return [map_leaves(value, x) for x in self.template]

    @property
    def numbers(self):
        """All integers among the arguments, in order, then the two addresses of Triton's scratch memory: both are 0."""
        results = []
        for name, annotation in self.kernel.parameters:
            if annotation is Operand and self.kinds[name]:
                results += chain.from_iterable(self.strides[name])
            elif name in self.kernel.indices:
                for value in map(self.values.get, self.kernel.indices[name]):
                    results += value if isinstance(value, tuple) else () if value is None else (value,)
        return *results, 0, 0

    @property
    def places(self):
        """Each parameter's index among the words of a launch, which are addresses, then floats, then integers."""
        parameters = [x for _, x in leaves(self.template) if not is_constant(x)] + [0, 0]
        ranks = [2 if not isinstance(x, str) else 1 if x == "fp64" else 0 for x in parameters]
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        return bytes(sorted(range(len(ranks)), key=order.__getitem__))

    @cached_property
    def words(self):
        """Returns (indices of the pointers that are not None, `numbers` as bytes, True if blocks share a result,
        `apart`)."""
        return self.present, array("q", self.numbers).tobytes(), self.dtypes.get("counter") is not None, self.apart

    @property
    def apart(self):
        """The workspace's size if it exceeds the stream's buffer, and is allocated for each launch; else 0."""
        return self.workspace if self.workspace > PARTIALS else 0

    def __call__(self, tensors, addresses, *floats):
        """Launches on the current stream of the plan's device, or in the interpreter if the tensors are on the CPU.
        tensors: the kernel's pointers, in order. addresses: the addresses of the first of them, which are known."""
        if active.tape is not None:
            active.tape.plans.append(self)
        elif self.index is None:
            *arguments, _ = self.arguments(tensors, floats)
            # (not as a tuple, whose constants the interpreter would turn into tensors)
            self.kernel.fn[self.grid](*arguments, SimpleNamespace(**self.constants))
        elif torch.cuda.current_device() == self.index:
            start = self.start
            if start is None:
                start = self.start = self.loaded(self.index)[1]
            of_others = [0 if t is None else t.data_ptr() for t in tensors[len(addresses) :]]
            start(self, (*addresses, *of_others), floats)
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
    """The index of the GPU; None on the CPU, where kernels are interpreted."""
    return device.index


_arch = {}


def arch_of(device):
    """The GPU's architecture, as in the keys of Kernel.configs; None on the CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return None
    if device.index not in _arch:
        _arch[device.index] = gpu_target(device.index).arch
    return _arch[device.index]


_plans = {}
PLANS = 4096  # the most plans kept. When full, all are dropped: a program with more keeps making new shapes


def cached_plan(key, build, device):
    """The plan for this key. The first call makes it with build(architecture)."""
    plan = None if active.tape else _plans.get(key)
    if plan is None:
        if len(_plans) >= PLANS:
            _plans.clear()
        plan = build(arch_of(device))
        plan.index = gpu_index(device)
        if not active.tape:
            _plans[key] = plan
    return plan

"""How a kernel is declared and launched.

A `Kernel` holds a jit function together with its launch data, and a `Plan` is one specialisation of it: argument
types, constants and grid. The launcher, the interpreter tests and the ahead-of-time check all go through `Plan`:
what is checked without a GPU is what runs on one. There is no autotuning, and a kernel is compiled for what its plan
says and nothing else, so that a new shape seldom compiles a new one.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .indexing import LINE, VECTOR

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
        declared = (*self.pointers, *self.floats, *self.all_tuples, *self.indices, *self.constants)
        if tuple(self.fn.arg_names) != declared:
            raise TypeError(f"{self.fn.__name__} takes {self.fn.arg_names}, declared are {declared}")
        KERNELS[self.fn.__name__] = self

    @property
    def all_tuples(self):
        strides = (f"{name}_{group}" for name in self.operands for group in ("outer", "inner"))
        return ("outer_shape", "inner_shape", *strides, *self.tuples)

    def config(self, arch=None):
        return self.configs.get(arch, self.configs[None])


KERNELS = {}


class Plan:
    """One specialisation of a kernel, with everything but the pointers and the floats filled in.

    tensors: the operands; dtypes: of the other pointers, None for an absent one; values: by argument name."""

    def __init__(self, kernel, tensors, dtypes, outer, inner, kinds, vec, values, *, grid, wide, arch):
        self.kernel, self.grid, self.config = kernel, (*grid, 1), kernel.config(arch)
        names = kernel.fn.arg_names
        values = values | {"outer_shape": outer.shape, "inner_shape": inner.shape}
        self.attrs = {}

        def multiple(of, *path):
            self.attrs[path] = [["tt.divisibility", of]]

        for name, tensor, kind, o, i in zip(kernel.operands, tensors, kinds, outer.strides, inner.strides):
            dtypes = dtypes | {name: None if tensor is None else tensor.dtype}
            values |= {f"{name}_outer": o, f"{name}_inner": i, name.upper(): kind.value}
            if kind is VECTOR or kind is LINE:  # aligned, and so are its rows, and those of every batch
                multiple(16, names.index(name))
                for steps in (f"{name}_outer", f"{name}_batch"):
                    for d in range(len(values[steps]) if steps in names else 0):
                        multiple(vec, names.index(steps), d)
        if inner.numel % vec == 0:
            multiple(vec, names.index("N"))

        index = "i64" if wide else "i32"
        tuples = kernel.all_tuples
        self.signature = {name: dtypes[name] and POINTER[dtypes[name]] for name in kernel.pointers}
        self.signature |= dict.fromkeys(kernel.floats, "fp64")
        if "parameters" in kernel.floats:
            self.signature["parameters"] = ("fp64",) * values["parameters"]
        self.signature |= {name: values[name] and (index,) * len(values[name]) for name in tuples}
        self.signature |= dict.fromkeys(kernel.indices, index)
        self.signature |= dict.fromkeys(kernel.constants, None)
        self.signature = {name: "constexpr" if kind is None else kind for name, kind in self.signature.items()}
        self.constants = {name: values.get(name) for name, kind in self.signature.items() if kind == "constexpr"}
        self.tail = tuple(values[name] for name in (*tuples, *kernel.indices, *kernel.constants))
        self.runners = {}  # by device index

    def source(self):
        return ASTSource(self.kernel.fn, self.signature, self.constants, self.attrs)

    def compile(self, target):
        options = {"num_warps": self.config.threads // target.warp_size}
        registers = self.config.max_registers[self.constants["VEC"] == 1]
        if registers and target.backend == "cuda":
            functor = self.constants.get("F")  # one whose arithmetic would spill says how many it needs
            options["maxnreg"] = max(registers, getattr(functor, "max_registers", 0))
        return triton.compile(self.source(), target=target, options=options)

    def __call__(self, device, *pointers_and_floats):
        """Launch on the current stream of `device`, in the interpreter if the tensors are on the CPU."""
        if device.type == "cpu":
            self.kernel.fn[self.grid](*pointers_and_floats, *self.tail)
        elif torch.cuda.current_device() == device.index:
            self._launch(device.index, pointers_and_floats)
        else:
            with torch.cuda.device(device):
                self._launch(device.index, pointers_and_floats)

    def _launch(self, index, arguments):
        runner = self.runners.get(index)
        if runner is None:
            runner = self.runners[index] = self.binary(index)[self.grid]
        runner(*arguments, *self.tail)

    def binary(self, index):
        """Compiled and loaded once for all plans that differ in sizes alone: new shapes must not load ever more."""
        key = index, self.kernel.fn, tuple(self.signature.items()), tuple(self.constants.items()), repr(self.attrs)
        if key not in _binaries:
            _binaries[key] = self.compile(gpu_target(index))
        return _binaries[key]


_binaries = {}


def gpu_target(index):
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return GPUTarget("hip", properties.gcnArchName.split(":")[0], 64)
    return GPUTarget("cuda", properties.major * 10 + properties.minor, 32)


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


def cached_plan(key, build):
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= PLANS:
            _plans.clear()
        plan = _plans[key] = build()
    return plan


def trait(tensor):
    """All that a plan may depend on in a tensor."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16


COUNTERS = 1024  # output blocks that may be split; more of them fill a GPU without splitting
_counters = {}


def split_counters(device):
    """Zeroed counters of the blocks that have finished, one per output block; the last block puts its own back to 0.

    Zeroing them for each call would be a second launch. One buffer per (device, stream) is enough: the kernels of a
    stream run one after another, and each leaves zeros behind, since its last block writes the 0 after every other
    block has counted. Two streams may run at once, and so have a buffer each. A captured graph may be replayed on
    another stream, beside eager work on the one that captured it: it gets counters of its own, from its own memory
    pool, that a node of the graph zeroes in every replay."""
    if device.type == "cpu":
        return torch.zeros(COUNTERS, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    key = device.index, torch.cuda.current_stream(device).cuda_stream
    if key not in _counters:
        _counters[key] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    return _counters[key]


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
    return torch.empty(shape, dtype=dtype, device=tensor.device)


def common_shape(first, *others):
    """torch.broadcast_shapes takes 5 us, and nearly always says what was known."""
    if all(first.shape == x.shape for x in others):
        return first.shape
    return torch.broadcast_shapes(first.shape, *(x.shape for x in others))

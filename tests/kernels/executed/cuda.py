"""Runs the ops of csrc/cuda on CPU tensors: their host code runs as it is, and each kernel that it launches is executed
from nvcc's PTX.

ops = cuda.Ops([*(ROOT / "csrc/cuda/lists").glob("*.cu")])
ops._grad_norm([x], 2.0)       # a raw op; raises machine.Fault if a kernel misbehaves
ops.launches                   # the launches of the last call
"""

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path

import torch

import safeops  # noqa: F401  (it declares the ops)
from tests.kernels.executed import machine
from tests.kernels.executed.machine import ROOT

FOLDER = machine.FOLDER / "cuda"
RUNTIME, LIMITS = (Path(__file__).with_name(name) for name in ("cudart.cpp", "limits.h"))
# take_kernel (masked_compact.cu) may read unwritten memory: it loads a number before it knows that the number counts.
ANYTHING = re.compile(r"take_kernel")


@cache
def nvcc():
    homes = os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"
    places = [shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((place for place in places if place and os.path.exists(place)), None)


def available():
    """Returns True if the compilers are installed."""
    return nvcc() is not None and machine.available()


@cache
def compilers():
    command = [nvcc(), "--version"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout + torch.__version__


def included(path, found):
    """Adds a source and all files that it includes by #include "..." to found, as {path: text}."""
    if path.exists() and path not in found:
        found[path] = path.read_text()
        for name in re.findall(r'#include "([^"]+)"', found[path]):
            included(path.parent / name, found), included(ROOT / "csrc" / name, found)
    return found


def compiled(source, arch, parts):
    """Returns the object file of a source; its PTX lies beside it. parts: the value of the macro SAFEOPS_PARTS, how
    many parts masked_select counts (limits.h)."""
    options = [f"-DSAFEOPS_PARTS={parts}"] if parts and "SAFEOPS_PARTS" in source.read_text() else []
    text = f"{arch} {options} {compilers()} {LIMITS.read_text()}" + "".join(included(source, {}).values())
    target = FOLDER / f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.o"
    if target.exists():
        return target
    command = [nvcc(), "-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT}/csrc"]
    command += [f"-gencode=arch=compute_{arch},code=compute_{arch}", "-DUSE_CUDA", f"-include={LIMITS}", *options]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000", f"-isystem={Path(torch.__file__).parent}/include"]
    # no-gnu-unique, hidden: the libraries of one process must not share static variables.
    command += ["-Xcompiler=-O1,-fPIC,-fno-gnu-unique,-fvisibility=hidden,-fvisibility-inlines-hidden"]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        half = Path(folder) / target.name
        command += ["-keep", f"-keep-dir={folder}", "-c", str(source), "-o", str(half)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{source}: {result.stderr}")
        for ptx in Path(folder).glob("*.ptx"):
            os.replace(ptx, target.with_suffix(".ptx"))
        os.replace(half, target)
    return target


def built(sources, arch, parts):
    """Returns (library of these sources, their PTX files). The library's file name is its ops' namespace."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock, ThreadPoolExecutor(2) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = list(pool.map(lambda source: compiled(source, arch, parts), [*sources, RUNTIME]))
        name = hashlib.sha256(f"{objects} {parts}".encode()).hexdigest()[:16]
        target = FOLDER / f"safeops_executed_{name}.so"
        if not target.exists():
            libraries = f"-L{Path(torch.__file__).parent}/lib", "-ltorch", "-ltorch_cpu", "-ldl"
            half = target.with_suffix(f".{os.getpid()}")
            command = ["g++", "-shared", "-Wl,-Bsymbolic", *objects, *libraries, "-o", half]
            subprocess.run(command, check=True)
            os.replace(half, target)
    return target, [path for path in (x.with_suffix(".ptx") for x in objects) if path.exists()]


def entries(ptx):
    """Returns {kernel: PTX of the kernel and of the functions that it may call}."""
    shared, kernels = [], {}
    for part in re.split(r"(?m)^(?=(?:\.visible |\.weak )?\.(?:entry|func) )", ptx):
        entry = re.match(r"\S*\s*\.entry\s+([\w$]+)", part)
        code, end, rest = part.rpartition("\n}\n")
        if entry:
            kernels[entry[1]] = code + end
        shared.append(rest if entry else part)
    shared = "\n".join(shared)
    return {name: f"{shared}\n{code}" for name, code in kernels.items()}


@cache
def demangled(name):
    result = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    return re.sub(r"safeops::cuda::|\(anonymous namespace\)::", "", result)


class Ops:
    """The raw ops of some sources, as attributes. bias: as in machine.run. host: an operand that counts as a CPU
    tensor.

    whole: use the limits of a GPU, not the small ones of limits.h. kept: if not None, launches are recorded instead of
    executed, so that tensors may have any size; the host then reads this number wherever it copies a count from the
    device."""

    def __init__(self, sources, arch=90, whole=False):
        self.target, self.texts = built(sources, arch, 1024 if whole else None)
        self.kept, self.bias, self.host, self.launches, self.fault, self.operands = None, 0, None, [], None, []
        self.programs = {}
        torch.ops.load_library(str(self.target))
        self.runtime = ctypes.CDLL(str(self.target))
        self.fragment = torch.library.Library(self.target.stem, "FRAGMENT")
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_uint),
            ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p),
        )  # fmt: skip
        self.callback = kind(self.launch)
        self.runtime.executed_launches_go_to(self.callback)
        if whole:
            ctypes.c_int64.in_dll(self.runtime, "executed_index_limit").value = 1 << 31
        self.runtime.executed_memory_operations.restype = ctypes.c_int64

    def __getattr__(self, name):
        if not name.startswith("_") or name.startswith("__"):
            raise AttributeError(name)
        schema = getattr(torch.ops.safeops, name).default._schema
        self.fragment.define(str(schema).removeprefix("safeops::"))
        raw = getattr(getattr(torch.ops, self.target.stem), name)

        def call(*values, **named):
            arguments = dict(zip((x.name for x in schema.arguments), values)) | named
            self.operands = [x for name, value in arguments.items() for x in tensors(name, value)]
            self.launches, self.fault = [], None
            self.runtime.executed_plans(ctypes.c_int64(-1 if self.kept is None else self.kept))
            self.runtime.executed_in_host(ctypes.c_void_p(None if self.host is None else self.host.data_ptr()))
            try:
                result = raw(*values, **named)
            except RuntimeError:
                if self.fault is None:
                    raise
            finally:
                self.memory_operations = self.runtime.executed_memory_operations()
                self.runtime.executed_end()
                self.operands = []
            if self.fault:
                raise self.fault
            return result

        setattr(self, name, call)
        return call

    @property
    def wide(self):
        """Returns how many 16-byte loads the threads of the last call did, without CUB's kernels."""
        return sum(launch.wide for launch in self.launches if "cub::" not in launch.kernel)

    @cached_property
    def kernels(self):
        return {name: text for path in self.texts for name, text in entries(path.read_text()).items()}

    def program(self, kernel):
        if kernel not in self.programs:
            text = self.kernels[kernel]
            self.programs[kernel] = machine.Program(text, kernel)
        return self.programs[kernel]

    def launch(self, kernel, grid, threads, shared, arguments):
        """Execute a launch that the host code makes. An error is kept, and raised when the op returns."""
        if self.kept is not None:
            self.launches.append(machine.Launched(kernel.decode(), (grid[0], 1, 1), threads[0], shared))
            return 0
        try:
            grid, threads = tuple(grid[:3]), tuple(threads[:3])
            program = self.program(kernel.decode())
            orders = machine.ORDERS if program.ordered else 1
            params = bytearray(program.parsed.param_bytes)
            for at, (offset, size) in zip(arguments, program.parsed.params.values()):
                params[offset : offset + size] = ctypes.string_at(at, size)
            operands = self.memory(not ANYTHING.search(kernel.decode()))
            launched = machine.Launched(demangled(kernel.decode()), grid, threads[0], shared)
            self.launches.append(launched)
            launched.steps = machine.run_in_orders(
                program, operands, bytes(params), grid, threads, shared, orders=orders, bias=self.bias
            )  # fmt: skip
            launched.wide = operands.wide
        except BaseException as error:
            self.fault = self.fault or error
        return int(self.fault is not None)

    def memory(self, watches_unwritten):
        """Returns the memory that a launch may touch: the operands of this call, and what the call has allocated."""
        rows = (ctypes.c_int64 * 4 * 64)()
        count = self.runtime.executed_allocations(rows, ctypes.c_int64(64))
        assert count <= len(rows)
        named, fresh = [(name, x) for name, x in self.operands if x is not self.host], set()
        for number, (start, size, element, unwritten) in enumerate(rows[:count]):
            if size:
                data = torch.frombuffer((ctypes.c_char * size).from_address(start), dtype=torch.uint8)
                if unwritten and watches_unwritten:
                    fresh.add(start)
                dtype = {1: torch.uint8, 2: torch.int16}.get(element, torch.int32)
                named.append((f"allocation {number}", data.view(dtype)))
        return machine.Operands(named, fresh)


@cache
def ops(*sources):
    """Returns the Ops of these sources, made once per process."""
    return Ops(sources)


def tensors(name, value):
    if isinstance(value, (list, tuple)):
        return [x for number, item in enumerate(value) for x in tensors(f"{name}[{number}]", item)]
    return [(name, value)] if isinstance(value, torch.Tensor) else []

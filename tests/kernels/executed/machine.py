"""Runs programs, PTX kernels that ptx.py has translated, in the executor's C++ library, with checks of their memory."""

import ctypes
import fcntl
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tests.kernels.executed import ptx

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "build" / "executed"
SOURCES = [
    Path(__file__).with_name(name) for name in ("executor.cpp", "accesses.h", "arithmetic.h", "memory.h", "machine.h")
]
# -ffp-contract=off: g++ must not fuse a product that the PTX rounds. -march=native: the library runs on this machine.
COMMAND = "g++ -std=c++20 -O3 -march=native -ffp-contract=off -fno-math-errno -shared -fPIC".split()
GARBAGE = (0x7FC17FC1, 0xC2F1C2F1)  # content of unwritten memory, as fp32: NaN; in every second order -120.6
MOST_STEPS = 1 << 32
REGISTERS = 65_536  # a multiprocessor's, so a block has at most these
# Only a kernel with these instructions can depend on the order of its blocks. In a kernel without them, blocks either
# do not communicate, or they race, which shows in any order.
ORDERED = re.compile(r"\b(atom|red|ld\.(relaxed|acquire|volatile))\b")
ORDERS = 3


class Fault(AssertionError):
    """A launch did something that a GPU forbids or leaves undefined, or its result depends on the order of
    execution."""


class Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_int * 3), ("threads", ctypes.c_int * 3), ("shared_bytes", ctypes.c_int),
        ("params", ctypes.c_char_p), ("blocks", ctypes.c_void_p), ("block_count", ctypes.c_int64),
        ("seed", ctypes.c_uint64), ("bias", ctypes.c_int), ("garbage", ctypes.c_uint32),
        ("most_steps", ctypes.c_int64),
    ]  # fmt: skip


@cache
def executor():
    """Returns the executor's library, which is compiled once for its sources, the compiler and the CPU."""
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("flags")), platform.machine())
    text = "".join(path.read_text() for path in SOURCES) + " ".join(COMMAND) + cpu
    target = FOLDER / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            half = target.with_suffix(f".{os.getpid()}")
            subprocess.run([*COMMAND, SOURCES[0], "-o", half], check=True)
            os.replace(half, target)
    library = ctypes.CDLL(str(target))
    library.executed_error.restype = library.executed_events.restype = ctypes.c_char_p
    library.executed_program.restype = library.executed_memory.restype = ctypes.c_void_p
    library.executed_run.restype = library.executed_wide.restype = ctypes.c_int64
    return library


def available():
    return shutil.which("g++") is not None


@dataclass
class Launched:
    """A launch that has run. wide: how many 16-byte loads its threads did. steps: instructions that all warps ran, in
    all orders together."""

    kernel: str
    grid: tuple
    threads: int
    shared: int
    wide: int = 0
    steps: int = 0


class Program:
    """A kernel from PTX, ready to be launched."""

    def __init__(self, text, entry=None):
        self.parsed = ptx.program(text, entry)
        self.handle = executor().executed_program(self.parsed.text.encode())
        if not self.handle:
            raise ValueError(f"{self.parsed.name}: {executor().executed_error().decode()}")
        self.ordered = bool(ORDERED.search(self.parsed.text))
        most = re.search(r"\.maxnreg\s+(\d+)", text)
        self.registers = int(most[1]) if most else 0

    def pack(self, values):
        """Returns the kernel's parameters as bytes. values: their integers, in order; missing ones are 0."""
        data = bytearray(self.parsed.param_bytes)
        for value, (offset, size) in zip(values, self.parsed.params.values()):
            data[offset : offset + size] = (value & (1 << 8 * size) - 1).to_bytes(size, "little")
        return bytes(data)


def bytes_of(tensor):
    """Returns the whole storage of a tensor as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def elements(tensors):
    """Returns a mask of the storage's bytes: 1 where a byte belongs to one of these tensors, which share the storage.
    None: all bytes do."""
    size = tensors[0].untyped_storage().nbytes()
    if any(t.numel() * t.element_size() == size and t.is_contiguous() for t in tensors):
        return None
    inside = torch.zeros(size, dtype=torch.uint8)
    for t in tensors:
        width = t.element_size()
        steps = [step * width for step in t.stride()]
        inside.as_strided((*t.shape, width), (*steps, 1), t.storage_offset() * width).fill_(1)
    return None if inside.all() else inside


class Operands:
    """The storages that a launch may touch, by name."""

    def __init__(self, named, fresh=()):
        """named: (name, tensor) pairs. fresh: addresses of the storages that nobody has written."""
        storages = {}
        for name, tensor in named:
            if tensor is not None and tensor.untyped_storage().nbytes():
                storages.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        self.storages = []
        for start, tensors in storages.items():
            grain = min(4, *(t.element_size() for _, t in tensors))
            name = " and ".join(f"{n} {str(t.dtype)[6:]}{tuple(t.shape)}" for n, t in tensors)
            # A kernel may write a whole new allocation (`fresh`), but in other storages only a tensor's own bytes.
            inside = None if start in fresh else elements([t for _, t in tensors])
            self.storages.append((start, bytes_of(tensors[0][1]), name, grain, start in fresh, inside))
        self.watched = set()  # storages that a launch in an earlier order has written
        self.wide = 0  # 16-byte loads by a thread, in the last order

    def memory(self):
        """Returns these storages as the memory that the executor's library takes."""
        library, memory = executor(), ctypes.c_void_p(executor().executed_memory())
        for start, data, name, grain, fresh, inside in self.storages:
            mask = None if inside is None else ctypes.c_void_p(inside.data_ptr())
            library.executed_region(
                memory, ctypes.c_uint64(start), ctypes.c_uint64(len(data)), name.encode(), grain, int(fresh), mask,
                int(start in self.watched),
            )  # fmt: skip
        return memory

    def fill_fresh(self, garbage):
        for _, data, _, _, fresh, _ in self.storages:
            if fresh:
                pattern = torch.tensor(list(garbage.to_bytes(4, "little")), dtype=torch.uint8)
                data.copy_(pattern.repeat(len(data) // 4 + 1)[: len(data)])

    def copies(self):
        return [data.clone() for _, data, *_ in self.storages]

    def restore(self, copies):
        for (_, data, *_), copy in zip(self.storages, copies):
            data.copy_(copy)


def run(program, operands, params, grid, threads, shared=0, *, blocks=None, seed=0, bias=0, garbage=GARBAGE[0]):
    """Execute a launch once. Returns the number of steps (instructions) of its warps. Raises Fault if the launch does
    something forbidden.

    blocks: linear numbers of the blocks to run, in this order; None: all. seed: selects the order of the warps.
    bias: -1 or 1 moves approximations down or up by their largest error. garbage: fills unwritten memory."""
    count = math.prod(threads)
    if count > 1024 or program.registers * count > REGISTERS:
        raise Fault(
            f"{program.parsed.name}: {count} threads of {program.registers} registers are more than a block has"
        )
    library, memory = executor(), operands.memory()
    order = torch.arange(math.prod(grid)) if blocks is None else blocks
    launch = Launch(
        (ctypes.c_int * 3)(*grid), (ctypes.c_int * 3)(*threads), shared, params, order.data_ptr(), len(order), seed,
        bias, garbage, MOST_STEPS,
    )  # fmt: skip
    try:
        steps = library.executed_run(ctypes.c_void_p(program.handle), memory, ctypes.byref(launch))
        error = library.executed_error().decode()
        operands.wide = library.executed_wide(memory)
        lines = []
        for event in library.executed_events(memory).decode().splitlines():
            what, count, where, detail = event.split("\t")
            lines.append(f"{what}, {count} times: {where}: {detail}")
        for start, *_ in operands.storages:
            if library.executed_written(memory, ctypes.c_uint64(start)):
                operands.watched.add(start)
    finally:
        library.executed_free(memory)
    if steps < 0:
        lines.append(error)
    if lines:
        raise Fault(f"{program.parsed.name}, grid {tuple(grid)}:\n" + "\n".join(lines))
    return steps


def run_in_orders(program, operands, params, grid, threads, shared=0, *, orders=ORDERS, bias=0):
    """Execute a launch in several orders of its blocks and warps. Raises Fault if the results differ in a bit."""
    # Without ORDERED instructions two orders suffice: their garbage differs, which shows reads of unwritten memory.
    orders = orders if program.ordered else min(orders, 2)
    first = torch.arange(math.prod(grid))
    before = operands.copies() if orders > 1 else None
    outcomes, steps = [], 0
    for order in range(orders):
        if order:
            operands.restore(before)
        garbage = GARBAGE[order % 2]
        operands.fill_fresh(garbage)
        blocks = first.flip(0) if order else first
        if order > 1:
            blocks = torch.randperm(len(first), generator=torch.Generator().manual_seed(order))
        steps += run(
            program, operands, params, grid, threads, shared, blocks=blocks, seed=order, bias=bias, garbage=garbage
        )
        if orders > 1:
            outcomes.append(operands.copies())
    for order, outcome in enumerate(outcomes[1:], 1):
        compare(program, operands, outcomes[0], outcome, GARBAGE[0], GARBAGE[order % 2])
    return steps


def words(data, at):
    """Returns the aligned four bytes that contain byte `at`, in hexadecimal."""
    return bytes(data[at // 4 * 4 : at // 4 * 4 + 4].tolist())[::-1].hex()


def compare(program, operands, one, other, garbage_of_one, garbage_of_other):
    """Raise Fault if two orders left different bits. Bytes that neither order wrote may differ by their garbage."""
    for (_, _, name, _, fresh, _), a, b in zip(operands.storages, one, other):
        unequal = a != b
        if fresh and unequal.any():
            at = torch.arange(len(a)) % 4 * 8
            unequal &= (a != (garbage_of_one >> at & 0xFF)) | (b != (garbage_of_other >> at & 0xFF))
        if unequal.any():
            where = unequal.nonzero()[0].item()
            raise Fault(
                f"{program.parsed.name}: {int(unequal.sum())} bytes of {name} depend on the order of blocks and warps, "
                f"or on what nobody wrote, the first at {where}: {words(a, where)} or {words(b, where)}"
            )

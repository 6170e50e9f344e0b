"""What the model of the GPU (benchmarks/gpu_model.py) says of every CUDA kernel in C++.

The launches are the launchers' own: the emulated sources note them (tests/kernels/emulate). The machine code is the
library's. What neither says stands here: how often a loop inside a kernel runs, how often a block waits for memory.
"""

import ctypes
import re
import subprocess
import tempfile
from math import ceil, prod
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import machine_code
from benchmarks.gpu_model import Load, predict_all
from benchmarks.machine_code import NONE, STORES
from tests.kernels.emulated import BINARY, HOST, ROOT, SOURCES, UNARY, compiled
from tests.kernels.test_cuda_build import LIBRARY, NVDISASM, cuobjdump, demangled, resources, texts

CUDA = ROOT / "csrc" / "cuda"
IMAGES = "ssim", "ssim_backward", "ssim_volumes", "ssim_volumes_backward"
FAMILIES = {
    "elementwise": [*SOURCES, *HOST],
    "selection": sorted((CUDA / "selection").glob("*.cu")),
    "lists": sorted((CUDA / "lists").glob("*.cu")),
    "ssim": [CUDA / "images" / f"{name}.cu" for name in IMAGES],
    "total_variation": sorted((CUDA / "images").glob("total_variation*.cu")),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROLLED = ("safe_pow",)  # csrc/cuda/elementwise/loop.cuh
# A path by which elements of a dtype go where each has its own.
OWN = {torch.bfloat16: r"BF16|0x10000, RZ|0xffff0000|0x7f80", torch.float32: NONE}


SHIFTED = r"SHF\.R\.U64"  # what the flat kernel does with operands that are not aligned


class Step(NamedTuple):
    """A launch, of a kernel by this name."""

    kernel: str
    read: int
    written: int = 0
    passes: dict = {}  # {bytes that a pass of a loop loads: passes}
    waits: float = 1  # of a block for memory, outside of loops
    rounds: int = 0
    mark: str = NONE
    avoid: str = NONE
    most: bool = False


class Case(NamedTuple):
    elements: int
    read: int  # bytes that the op must move
    written: int
    steps: list  # [(Step, (kernel, blocks, threads, shared))]


class Plans:
    """The launches of raw ops."""

    def __init__(self, folder):
        self.library = torch.library.Library("safeops_plans", "FRAGMENT")
        self.known, self.built, self.names = set(), {}, {}
        for family, sources in FAMILIES.items():
            target = compiled(sources, folder / f"{family}.so", "-DSAFEOPS_PLANS", "-O0")
            torch.ops.load_library(str(target))
            self.built[family] = ctypes.CDLL(str(target)).emulated_plan
            listing = subprocess.run(["nm", "-C", target], capture_output=True, text=True, check=True).stdout
            rows = re.findall(r"^0*(\w+) \w (.*kernel.*)$", listing, re.M)
            self.names[family] = {int(at, 16): short(name) for at, name in rows}

    def __call__(self, family, op, *operands, kept=0):
        """(result, [(kernel, blocks, threads, shared)])"""
        if op not in self.known:
            self.known.add(op)
            schema = getattr(torch.ops.safeops, op).default._schema
            self.library.define(str(schema).removeprefix("safeops::"))
        read, rows = self.built[family], (ctypes.c_int64 * 4 * 64)()
        read(rows, ctypes.c_int64(kept))
        result = getattr(torch.ops.safeops_plans, op)(*operands)
        count = read(rows, ctypes.c_int64(0))
        return result, [(self.names[family].get(row[0], ""), *row[1:]) for row in rows[:count]]


def short(name):
    return re.sub(r"safeops::cuda::|\(anonymous namespace\)::", "", name)


def tensors(x):
    return (
        [x]
        if isinstance(x, torch.Tensor)
        else [t for y in x for t in tensors(y)]
        if isinstance(x, (list, tuple))
        else []
    )


def size(x):
    """Bytes of tensors, of which those that repeat are read once."""
    return sum(t.element_size() * prod(n for n, step in zip(t.shape, t.stride()) if step) for t in tensors(x))


def cases(n, plans):
    """{(op, direction, layout, dtype): Case} of about n elements."""
    found = {}

    def add(name, family, op, operands, steps, kept=0, read=None, written=None, elements=n):
        result, launches = plans(family, op, *operands, kept=kept)
        read, written = size(operands) if read is None else read, size(result) if written is None else written
        steps = steps(read, written, launches)
        assert [re.search(s.kernel, k[0]) is not None for s, k in zip(steps, launches)] == [True] * len(launches), (
            name, [s.kernel for s in steps], launches)  # fmt: skip
        found[name] = Case(elements, read, written, list(zip(steps, launches)))

    for dtype_name, dtype in DTYPES.items():
        elementwise(n, dtype, dtype_name, add)
        lists(n, dtype, dtype_name, add)
        selection(n, dtype, dtype_name, add)
        images(n, dtype, dtype_name, add)
    return found


def empty(*shape, dtype):
    return torch.empty(shape, dtype=dtype)


def elementwise(n, dtype, name, add):
    """`offset` begins at no multiple of 16 bytes; `rows` has a second operand that repeats along rows of 4096."""
    x, offset, rows = empty(n, dtype=dtype), empty(n + 1, dtype=dtype)[1:], empty(n // 4096, 4096, dtype=dtype)
    column, mask = empty(n // 4096, 1, dtype=dtype), empty(n, dtype=torch.bool)

    def one(kernel, inner=0):  # loops over dims are unrolled: of three dims there is no pass
        avoid = SHIFTED if kernel == "flat_kernel" else NONE
        return lambda read, written, _: [Step(kernel, read, written, {0: inner}, avoid=avoid, most=True)]

    for op in (*UNARY, *BINARY):
        inner = 16 // x.element_size() if op in ROLLED else 0
        count = 1 + (op in BINARY)
        add((op, "forward", "flat", name), "elementwise", f"_{op}", [x] * count, one("flat_kernel", inner))
        add(
            (op, "backward", "flat", name),
            "elementwise",
            f"_{op}_backward",
            [x] * (1 + count),
            one("flat_kernel", inner),
        )
    add(("safe_log", "forward", "offset", name), "elementwise", "_safe_log", [offset], one("kernel"))
    add(("safe_div", "forward", "offset", name), "elementwise", "_safe_div", [offset] * 2, one("kernel"))
    add(("safe_div", "forward", "rows", name), "elementwise", "_safe_div", [rows, column], one("rows_kernel"))
    add(("masked_fill", "forward", "flat", name), "elementwise", "_masked_fill", [x, mask], one("flat_kernel"))
    some = mask[: n // 4096, None]
    add(("masked_fill", "forward", "rows", name), "elementwise", "_masked_fill", [rows, some], one("rows_kernel"))


def lists(n, dtype, name, add):
    """`list` has 300 tensors, most of the bytes in a few; `flat` one."""
    sizes = [n // 64] * 48 + [n // 4 // 252] * 252
    width = dtype.itemsize

    def scan(kernel, merged=None):
        def steps(read, written, launches):
            done = [launch for launch in launches if "scan" in launch[0]]
            warps, part = 4 * sum(launch[1] for launch in done), 24
            inner = {width: 0, 16: 0, 64: read / warps / 2048}
            each = [Step(kernel, read * l[1] * 4 // warps, written * l[1] * 4 // warps, inner, 0, mark=OWN[dtype])
                    for l in done]  # fmt: skip
            if merged:
                each.append(Step(merged, warps * part, 8, waits=0, rounds=1 + ceil(warps / 2048)))
            return each

        return steps

    for layout, parts in (("flat", [n]), ("list", sizes)):
        x = [empty(m, dtype=dtype) for m in parts]
        add(("grad_norm", "forward", layout, name), "lists", "_grad_norm", [x, 2.0], scan("scan", "merge"), written=8)
        out = empty(len(x), 8, dtype=torch.int64)
        add(
            ("health", "forward", layout, name), "lists", "_health_", [out, 0, x], scan("scan"), read=size(x), written=0
        )
        factor = empty(dtype=torch.float64)
        add(
            ("clip_grad_norm_", "in place", layout, name),
            "lists",
            "_scale_",
            [x, factor],
            scan("scan"),
            written=size(x),
        )


def selection(n, dtype, name, add):
    """Half of the elements, or rows, are kept; what is looked up is in order."""
    x, mask, width = empty(n, dtype=dtype), empty(n, dtype=torch.bool), dtype.itemsize
    half = empty(n // 2, dtype=dtype)
    inner = {8 * width: 8, 1: None, 0: None, STORES: 1}  # a warp's 2048 elements, eight times 32 at once

    def ranking(kernel):  # ticket, mask, look-back
        return lambda read, written, launches: [
            *(Step("^$", 0, launch[1]) for launch in launches[:-1]),
            Step(kernel, read, written, inner, 3),
        ]

    def select(read, written, launches):
        return [Step("^$", 0, launches[0][1]), Step("count", n, 8, inner, 3), Step("pack", read, written, inner, 2)]

    add(("masked_select", "forward", "flat", name), "selection", "_masked_select", [x, mask], select, kept=n // 2)
    add(("masked_scatter", "forward", "flat", name), "selection", "_masked_scatter", [x, half, mask], ranking("merge"))
    add(("masked_scatter", "backward", "flat", name), "selection", "_masked_scatter_backward", [x, mask, [n // 2]],
        ranking("part"))  # fmt: skip

    def compact(read, written, launches):
        slots = launches[-1][1] and read  # the kept half of x, and its index again
        return [Step("^$", 0, launches[0][1]), Step("number", m.numel(), k * 8, {0: None, 1: None, STORES: 16}, 3),
                Step("take", slots - m.numel() + k * 8, written - k * 8, {0: 0}, 3)]  # fmt: skip

    for layout, shape in (("flat", (n,)), ("rows", (n // 4096, 4096))):
        values, m = empty(*shape, dtype=dtype), mask[: shape[0]]
        k = shape[0] // 2
        add(("masked_compact", "forward", layout, name), "selection", "_masked_compact", [values, m, k], compact,
            read=m.numel() + size(values) // 2)  # fmt: skip
        grad, index = empty(k, *shape[1:], dtype=dtype), empty(k, dtype=torch.int64)
        add(("masked_compact", "backward", layout, name), "selection", "_masked_compact_backward", [grad, index, shape],
            lambda read, written, launches: [Step("^$", 0, launches[0][1]), Step("put", read, written // 2, {0: 0}, 2)])  # fmt: skip
    look = lambda read, written, _: [Step("look_up", read, written, {0: 0}, 2, most=True)]  # noqa: E731
    rows, index = empty(n // 4096, 4096, dtype=dtype), empty(n, dtype=torch.int64)
    add(("safe_gather", "forward", "flat", name), "selection", "_safe_gather", [x, index, 0], look)
    add(("safe_index_select", "forward", "rows", name), "selection", "_safe_index_select", [rows, index[: n // 4096], 0],
        look)  # fmt: skip


def images(n, dtype, name, add):
    """Images (N, 4, 512, 512) and volumes (N, 1, 64, 128, 128), windows of 11 a side."""
    shape, cube, options = (
        (max(n >> 20, 1), 4, 512, 512),
        (max(n >> 20, 1), 1, 64, 128, 128),
        (1.0, 11, 1.5, 0.01, 0.03),
    )
    x, v = empty(*shape, dtype=dtype), empty(*cube, dtype=dtype)
    packed = 16 // dtype.itemsize * 4  # pixels of a thread

    def merge(rows, parts):
        return Step("merge", rows * parts * 8, rows * 8, waits=0, rounds=1 + ceil(parts / 1024))

    def tiles(kernel):
        def steps(read, written, launches):
            runs = 52 * 6 / 256  # of windows across, of a thread
            found = [Step(kernel, read, written, {STORES: runs}, most=True)]
            return found + [merge(launches[1][1], launches[0][1] * 3 // launches[1][1]) for _ in launches[1:]]

        return steps

    def walk(kernel, loaded):
        def steps(read, written, launches):
            units = {loaded: read / dtype.itemsize / packed / (launches[0][1] * 256), 64: 0, 0: 0}
            found = [Step(kernel, read, written, units, 0, most=True)]
            return found + [merge(launches[1][1], launches[0][1] * 2 // launches[1][1]) for _ in launches[1:]]

        return steps

    def march(read, written, launches):  # 42 slices for 32 of windows; 18 x 8 runs across, by 256 threads
        found, slopes = [], prod(cube) * 16  # slopes: bytes that go through memory
        slices = {STORES: 144 / 256, 24: 42, 44: 42, 57: 42}
        rows = {18: cube[4] // 32, 27: prod(cube[:4]) / (8 * launches[0][1])}
        for (kernel, blocks, *_), (_, before, *_) in zip(launches, [launches[0], *launches]):
            if "level" in kernel:
                found.append(Step("level", 2 * size(v), 0, rows, 0, most=True))
            elif "merge" in kernel:
                found.append(merge(blocks, before * (4 if len(found) == 1 else 3) // blocks))
            else:
                more = (0, slopes) if "slope" in kernel else (slopes, written) if "blur" in kernel else (0, written)
                found.append(Step("slope|blur|ssim", read + more[0], more[1], slices, 1, most=True))
        return found

    add(("ssim", "forward", "images", name), "ssim", "_ssim", [x, x, None, *options, False, False], tiles("ssim"))
    sums = empty(3, *shape[:2], dtype=torch.float64)
    add(("ssim", "backward", "images", name), "ssim", "_ssim_backward",
        [sums, x, x, None, *options, False, False, True, True], tiles("ssim_backward"))  # fmt: skip
    sums = empty(3, *cube[:2], dtype=torch.float64)
    add(("ssim", "forward", "volumes", name), "ssim", "_ssim", [v, v, None, *options, False, False], march)
    add(("ssim", "backward", "volumes", name), "ssim", "_ssim_backward",
        [sums, v, v, None, *options, False, False, True, True], march)  # fmt: skip
    add(("total_variation", "forward", "images", name), "total_variation", "_total_variation", [x],
        walk("total", 80 + 4 * dtype.itemsize))  # fmt: skip
    add(("total_variation", "backward", "images", name), "total_variation", "_total_variation_backward",
        [empty(2, shape[0], dtype=torch.float64), x], walk("total", 104 + 8 * dtype.itemsize))  # fmt: skip


def kernels(arch):
    """({kernel: its listing}, {kernel: its resources}) of the library."""
    code, table = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        cuobjdump("-xelf", f"sm_{arch}", LIBRARY.resolve(), cwd=folder)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            code |= texts(cubin)
            table |= resources(cubin)
    listings = machine_code.disassembled([*code.values()], arch, NVDISASM)
    return demangled(dict(zip(code, listings))), demangled(table)


def predictions(gpu, found):
    """{name: (registers, rounds, Prediction)}"""
    listings, table = kernels(gpu.arch)
    codes, result = {}, {}
    for name, case in found.items():
        parts = []
        for step, (kernel, blocks, threads, shared) in case.steps:
            if not kernel:
                parts.append((machine_code.Code(machine_code.Work(), [], 0, 0),
                              Load(case.elements, 0, 0, 0, 0, step.read, step.written, 0, 0)))  # fmt: skip
                continue
            key = kernel, tuple(step.passes.items()), step.mark, step.avoid, step.most
            if key not in codes:
                once, _ = machine_code.main_path(listings[kernel], step.passes, step.mark, step.avoid, step.most)
                codes[key] = machine_code.Code(once, [], table[kernel]["registers"], shared)
            load = Load(case.elements, 0, blocks, threads, 0, step.read, step.written, 0, step.rounds, waits=step.waits)
            parts.append((codes[key], load))
        registers, rounds = (max(code.registers for code, _ in parts), sum(load.rounds for _, load in parts))
        result[name] = registers, rounds, predict_all(parts, case.read, case.written, gpu)
    return result


if __name__ == "__main__":
    import sys

    from benchmarks.gpu_model import GPUS

    with tempfile.TemporaryDirectory() as folder:
        plans = Plans(Path(folder))
    for n in (1 << 26, 1 << 22):
        for name, (registers, rounds, it) in predictions(GPUS["H200"], cases(n, plans)).items():
            if len(sys.argv) < 2 or re.search(sys.argv[1], " ".join(name)):
                print(f"{n >> 20}M {' '.join(name):45} {it.instructions:6.1f} {registers:4} {it.in_flight:6.1f} KiB "
                      f"{rounds:3} {it.bound:12} {it.time:7.1f} us {it.share:.2f}")  # fmt: skip

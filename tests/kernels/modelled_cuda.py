"""Predictions of the GPU model (benchmarks/gpu_model.py) for every CUDA kernel in C++.

The launchers run on CPU tensors, and their launches are recorded instead of executed (tests/kernels/executed/cuda.py).
The machine code is that of the built library. plans_cuda.py adds what neither shows: how often a loop runs, and how
often a block waits for memory.
"""

import re
import tempfile
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks import machine_code
from benchmarks.gpu_model import Load, predict_all
from tests.kernels import plans_cuda
from tests.kernels.cuda_sources import HOST, ROOT, SOURCES
from tests.kernels.executed import cuda
from tests.kernels.test_cuda_build import LIBRARY, NVDISASM, cuobjdump, demangled, resources, texts

CUDA = ROOT / "csrc" / "cuda"
IMAGES = "ssim", "ssim_backward", "ssim_volumes", "ssim_volumes_backward", "ms_ssim"
FAMILIES = {
    "elementwise": [*SOURCES, *HOST],
    "selection": sorted((CUDA / "selection").glob("*.cu")),
    "lists": sorted((CUDA / "lists").glob("*.cu")),
    "ssim": [CUDA / "images" / f"{name}.cu" for name in IMAGES],
    "total_variation": sorted((CUDA / "images").glob("total_variation*.cu")),
}


class Case(NamedTuple):
    elements: int
    read: int  # bytes that the op must move
    written: int
    steps: list  # [(Step, (kernel, blocks, threads, shared))]


class Plans:
    """Calls raw ops and records their launches."""

    def __init__(self):
        self.ops = {family: cuda.Ops(sources, whole=True) for family, sources in FAMILIES.items()}
        self.defined, self.names = set(), {}

    def __call__(self, family, op, *operands, kept=0):
        """Returns (result, [(kernel, blocks, threads, bytes of shared memory)]); a memset is ("", bytes, 0, 0)."""
        self.defined.add(op)
        ops = self.ops[family]
        ops.kept = kept
        result = getattr(ops, op)(*operands)
        new = {x.kernel: None for x in ops.launches if x.kernel and x.kernel not in self.names}
        self.names |= zip(new, demangled(new))
        rows = [(self.names.get(x.kernel, ""), x.grid[0], x.threads, x.shared) for x in ops.launches]
        return result, [row if row[0] else ("", row[3], 0, 0) for row in rows]


RAW = {"health": "_health_", "clip_grad_norm_": "_scale_"}  # op -> raw op, where that is not `_op`


def cases(n, plans):
    """Returns {(op, direction, layout, dtype): Case} of about n elements."""
    results = {}
    families = [getattr(plans_cuda, name) for name in FAMILIES]
    for (dtype_name, dtype), family in product(plans_cuda.DTYPES.items(), families):
        for (op, direction, layout), operands, steps, *more in family(n, dtype):
            options = more[0] if more else {}
            raw = RAW.get(op, f"_{op}" + "_backward" * (direction == "backward"))
            result, launches = plans(family.__name__, raw, *operands, kept=options.get("kept", 0))
            read, written = (
                options.get("read", plans_cuda.size(operands)),
                options.get("written", plans_cuda.size(result)),
            )
            expected = steps(read, written, launches)
            named = [re.search(s.kernel, launch[0]) for s, launch in zip(expected, launches)]
            assert len(expected) == len(launches) and all(named), (op, direction, layout, launches)
            results[op, direction, layout, dtype_name] = Case(n, read, written, list(zip(expected, launches)))
    return results


def kernels(arch):
    """Returns ({kernel: its disassembly}, {kernel: its registers and stack}) of the library."""
    code, table = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        cuobjdump("-xelf", f"sm_{arch}", LIBRARY.resolve(), cwd=folder)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            code |= texts(cubin)
            table |= resources(cubin)
    listings = machine_code.disassembled([*code.values()], arch, NVDISASM)
    return demangled(dict(zip(code, listings))), demangled(table)


def predictions(gpu, plans):
    """Returns {name: (registers per thread, rounds, Prediction)}. rounds: trips to memory one after the other, in which
    the last block adds up the partial results."""
    listings, table = kernels(gpu.arch)
    codes, result = {}, {}
    for name, case in plans.items():
        parts = []
        for step, (kernel, blocks, threads, shared) in case.steps:
            if not kernel:
                parts.append((machine_code.Code(machine_code.Work(), [], 0, 0),
                              Load(case.elements, 0, 0, 0, 0, step.read, step.written, 0, 0)))  # fmt: skip
                continue
            key = kernel, tuple(step.passes.items()), step.mark, step.avoid, step.most
            if key not in codes:
                once, _ = machine_code.main_path(listings[kernel], step.passes, step.mark, step.avoid, step.most)
                looped = any((often or 0) > 1 for often in step.passes.values())
                # For sm_80 the assembler may unroll a loop; then the path's instructions move all bytes without a loop.
                unrolled = (once.load + once.store) * blocks * threads >= step.read + step.written
                assert once.marks > 0 or unrolled or not looped, f"{kernel}: no loop loads {[*step.passes]} bytes"
                codes[key] = machine_code.Code(once, [], table[kernel]["registers"], shared)
            load = Load(case.elements, 0, blocks, threads, 0, step.read, step.written, 0, step.rounds, waits=step.waits)
            parts.append((codes[key], load))
        registers, rounds = (max(code.registers for code, _ in parts), sum(load.rounds for _, load in parts))
        result[name] = registers, rounds, predict_all(parts, case.read, case.written, gpu)
    return result

"""Every Triton kernel compiles for each architecture without a GPU, without spills, with 16-byte accesses where its
plan's name says "aligned".

The tests compile the launchers' own plans, for meta tensors. `python tests/kernels/test_triton_build.py` prints the
table of registers, stack and accesses.

This file plans the elementwise losses and sums. Aligned: all four dtypes (flat and odd-sized), every loss forward and
backward, rows, columns, a mask shared by channels, weights, mixed dtypes, 64-bit indices. General: two dtypes.
plans_*.py have the other kernels. `compiled_for` selects what each architecture compiles.
"""

import importlib
import os
import re
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles: needs Triton without TRITON_INTERPRET", allow_module_level=True)

import triton
import triton.language as tl
from safeops.kernels.classification.multi_margin_loss import MULTI_MARGIN
from safeops.kernels.engine import buffers, elementwise, launch, sums
from safeops.kernels.engine.indexing import LINE, PEELED, VECTOR
from safeops.kernels.engine.kernel import KERNELS, Config
from safeops.kernels.images import psnr
from safeops.kernels.losses import mse_loss
from triton.backends.compiler import GPUTarget

from safeops.core import library
from safeops.core.op import registry
from safeops.ops.losses._pointwise import PointwiseLoss
from tests.kernels import (
    plans_classification,
    plans_divergence,
    plans_info_nce,
    plans_regions,
    plans_rows,
    plans_segments,
    plans_statistics,
)
from tests.kernels.plans_statistics import BF16, F16, F32, F64, FLAT, meta

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)


# The modules of all pointwise losses but mse_loss, which has plans of its own for every variant. A module has `value`
# and `slope` (or `slopes`), or a dict FORMULAS with such a pair for each choice of the loss's flags.
LOSSES = [importlib.import_module(f"safeops.kernels.losses.{op.kernel}") for each in registry.values()
          for op in (each, *each.parts) if isinstance(op, PointwiseLoss) and op.name != "mse_loss"]  # fmt: skip


def formulas(module):
    """Returns {name: (functor of the value, functor of the derivative)} of a loss's module."""
    name = "loss " + module.__name__.rpartition(".")[2]
    plain = {(): (getattr(module, "value", None), getattr(module, "slopes", None) or getattr(module, "slope", None))}
    return {" ".join((name, *map(str, flags))): pair for flags, pair in getattr(module, "FORMULAS", plain).items()}


def third(f, x):
    """Returns the third operand, which is like x, or None if the loss has two."""
    return x if "z" in getattr(f, "arg_names", ()) else None


def reduced(f, x, y=None, mask=None, weight=None, dims=None, mean=True, finish=None):
    gone = [dims is None or d in dims for d in range(x.dim())]
    compute = F64 if finish or F64 in (x.dtype, y is not None and y.dtype) else F32
    by = (sums.BY_COUNT.value, None)
    tensors = (x, y, third(f, x), mask, weight)
    dtype = F32 if finish else compute
    return sums.plan(f, tensors, x.shape, gone, dtype, compute, mean, by, False, parameters(f), finish=finish)


def psnrs(x, mask=None):
    dims = range(1, x.dim())
    return reduced(psnr.square, x, x, mask, dims=dims, finish=psnr.decibels)


def psnrs_backward(x, mask=None):
    one = [-1] + [1] * (x.dim() - 1)
    upstream = meta(x.shape[:1], F32).view(one), meta(x.shape[:1], F64).view(one)
    tensors = (x, x, None, mask, None, *upstream, torch.empty_like(x), None, None)
    constants = {"F": psnr.slope, "SLOPES": elementwise.DIFFERENCE.value, "parameters": 0}
    return elementwise.plan(elementwise.ELEMENTWISE, tensors, elementwise.OUTPUTS, x.shape, F32, constants)


def parameters(functor):
    """Returns how many scalar parameters a functor has besides its operands."""
    return 0 if functor is None else len(functor.arg_names) - 2 - ("z" in functor.arg_names)


@triton.jit
def slopes(x, y, a, b, c):
    return a * tl.exp(x) - b * y, 3 * c * y * y - b * x


def mapped(f, x, y=None, mask=None, weight=None, grad=True, both=False):
    """Returns the plan of an elementwise launch. If y is None, the functor reads no x: its shape is the output's."""
    compute = F64 if x.dtype == F64 else F32
    upstream = (meta((), F32), meta((), F64)) if grad else (None, None)
    z, dy = third(f, x), x.clone() if both else None
    dz = None if z is None or not both else x.clone()
    tensors = (None if y is None else x, y, z, mask, weight, *upstream, torch.empty_like(x), dy, dz)
    name = getattr(f, "__name__", "")
    kind = elementwise.DIFFERENCE if name == "slope" else elementwise.NONE
    kind = elementwise.ALL_SLOPES if "slopes" in name else kind
    constants = {"F": f, "SLOPES": kind.value, "parameters": parameters(f)}
    return elementwise.plan(elementwise.ELEMENTWISE, tensors, elementwise.OUTPUTS, x.shape, compute, constants)


def cases():
    """Returns {name: plan}. A name that begins with "aligned" claims 16-byte accesses."""
    mse, total = mse_loss, None
    results = {}
    for dtype in (F16, BF16, F32, F64):
        name, x, mask = str(dtype)[6:], meta(FLAT, dtype), meta(FLAT, torch.bool)
        odd, odd_mask = meta((FLAT[0] + 1,), dtype), meta((FLAT[0] + 1,), torch.bool)
        results[f"aligned mse {name}"] = reduced(mse.value, x, x, mask)
        results[f"aligned mean {name}"] = reduced(total, x, None, mask)
        results[f"aligned mse_backward {name}"] = mapped(mse.slope, x, x, mask, both=True)
        results[f"aligned sum_backward {name}"] = mapped(None, x, None, mask)
        results[f"aligned odd mse {name}"] = reduced(mse.value, odd, odd, odd_mask)
        results[f"aligned odd mse_backward {name}"] = mapped(mse.slope, odd, odd, odd_mask)
    x, mask, w = meta(FLAT, BF16), meta(FLAT, torch.bool), meta(FLAT, F32)
    for module in LOSSES:
        for name, (value, derivative) in formulas(module).items():
            results[f"aligned {name} bf16"] = reduced(value, x, x, mask)
            results[f"aligned {name}_backward bf16"] = mapped(derivative, x, x, mask)
    results["aligned mse weight bf16+fp32"] = reduced(mse.value, x, w, mask, w)
    results["aligned mse_backward weight bf16"] = mapped(mse.slope, x, x, mask, w)
    results["aligned two slopes bf16"] = mapped(slopes, x, x, mask, both=True)
    results["aligned mse none bf16"] = mapped(mse.value, x, x, mask, grad=False)
    for dtype in (BF16, F32):
        name, x, mask = str(dtype)[6:], meta((8192, 4096), dtype), meta((8192, 4096), torch.bool)
        results[f"aligned rows {name}"] = reduced(total, x, None, mask, dims=[1])
        results[f"aligned few rows {name}"] = reduced(total, meta((64, 1 << 20), dtype), dims=[1])
        results[f"aligned columns {name}"] = reduced(total, x, None, mask, dims=[0])
        results[f"aligned columns weight {name}"] = reduced(total, x, None, mask, x, dims=[0])
        channels, shared = meta((32, 64, 4096), dtype), meta((32, 64, 4096), torch.bool, (4096, 0, 1))
        results[f"aligned channel mask mse {name}"] = reduced(mse.value, channels, channels, shared)
        results[f"aligned channel mask mse_backward {name}"] = mapped(mse.slope, channels, channels, shared)
        pictures, seen = meta((16, 1, 1024, 1024), dtype), meta((16, 1, 1024, 1024), torch.bool)
        for which, kept in (("", None), (" masked", seen)):
            results[f"aligned psnr{which} {name}"] = psnrs(pictures, kept)
            results[f"aligned psnr_backward{which} {name}"] = psnrs_backward(pictures, kept)
        huge = meta((1 << 33,), dtype)
        results[f"aligned 2^33 mse {name}"] = reduced(mse.value, huge, huge)
        results[f"aligned 2^33 mse_backward {name}"] = mapped(mse.slope, huge, huge)
        across = meta((8192, 4096), dtype, (1, 8192))
        results[f"general transposed mse {name}"] = reduced(mse.value, x, across, mask)
        results[f"general transposed mse_backward {name}"] = mapped(mse.slope, x, across, mask)
        results[f"general odd rows {name}"] = reduced(
            total, meta((511, 4095), dtype), None, meta((511, 1), torch.bool), dims=[1]
        )
        results[f"general batch and space {name}"] = reduced(total, meta((32, 64, 4095), dtype), dims=[0, 2])
        shape, strides = (64, 63, 62, 61), (61, 61 * 64 * 62, 61 * 64, 1)
        results[f"general 4-D weight mse {name}"] = reduced(mse.value, meta(shape, dtype, strides), meta(shape, dtype),
                                                          meta(shape, torch.bool), meta((63, 1, 1), F32))  # fmt: skip
        results[f"general wide mse_backward {name}"] = mapped(mse.slope, meta((1 << 16, 1 << 16), dtype),
                                                            meta((1 << 16, 1 << 16), dtype, (1, 1 << 16)))  # fmt: skip
    return results


def nvidia(tool, *arguments):
    return subprocess.run([BIN / tool, *arguments], capture_output=True, text=True, check=True).stdout


def resources(cubin, folder):
    """Returns {"registers": per thread, "stack": bytes, with spills} of a compiled kernel."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    row = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", nvidia("cuobjdump", "--dump-resource-usage", file))
    registers, stack, local = map(int, row.groups())
    return {"registers": registers, "stack": stack + local}


def machine_accesses(cubin, folder):
    """Returns [("load" or "store", bytes)] of the global accesses in the machine code. Slower than `ptx_accesses`: a
    second."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    results = []
    for kind, modifiers in re.findall(r"\b(LD|ST)G\.E(\S*)", nvidia("nvdisasm", "-c", file)):
        width = re.search(r"\.(256|128|64|U?S?16|U?S?8)\b", modifiers)
        bits = int(re.sub(r"\D", "", width.group(1))) if width else 32
        results.append(({"LD": "load", "ST": "store"}[kind], bits // 8))
    return results


def ptx_accesses(text):
    """Returns [("load" or "store", bytes)] of the global accesses in the PTX, whose widths the assembler keeps."""
    results = re.findall(r"\b(ld|st)\.\S*?global\S*?(?:\.v(\d))?\.[bfsu](\d+)\s", text)
    return [({"ld": "load", "st": "store"}[kind], int(many or 1) * int(bits) // 8) for kind, many, bits in results]


def report(plan, target, folder):
    """Returns {"registers", "stack": bytes with spills, "load" and "store": {width in bytes: count}}."""
    compiled = plan.compile(target)
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]

        def number(key):
            return int(re.search(rf"\.{key}:\s+(\d+)", text).group(1))

        results = {"registers": number("vgpr_count"), "stack": number("private_segment_fixed_size")}
        results["stack"] += number("vgpr_spill_count")
        suffix = {"ubyte": 1, "byte": 1, "ushort": 2, "short": 2, "short_d16": 2, "short_d16_hi": 2, "dword": 4}
        suffix |= {"dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
        accesses = re.findall(r"(?:global|buffer)_(load|store)_(\w+)", text)
        widths = [(kind, suffix.get(width, 0)) for kind, width in accesses]
    else:
        results = resources(compiled.asm["cubin"], folder)
        widths = ptx_accesses(compiled.asm["ptx"])
    for kind in ("load", "store"):
        results[kind] = {w: widths.count((kind, w)) for w in sorted({w for k, w in widths if k == kind})}
    return results


WIDE = (VECTOR.value, *(PEELED.value + vec for vec in (2, 4, 8)))


def vectors(plan, names):
    return [n for n in names if plan.kinds.get(n) in WIDE and plan.dtypes[n] != torch.bool]


# Bytes of stack that a kernel may use: two spilled registers. Weighted masked_var of columns on sm_100 loads them once
# per tile of a thousand instructions. More than 128 registers would cost more: half of the resident threads.
SPILLS = 8


# Kernels with wider accesses than plan.kinds says: they read rows that another launch has laid out, or boxes.
LAID_OUT = re.compile(r"(info_nce_(\w+_)?|box_)kernel")


def check(name, plan, facts):
    assert facts["stack"] <= SPILLS, f"{name}: {facts['stack']} bytes of stack or spills"
    if not name.startswith("aligned"):  # a wide access means that tile.address takes strides for contiguous
        sizes = {plan.dtypes[plan.kernel.pointers[i]].itemsize for i in plan.present}
        sizes |= {16} if plan.dtypes.get("partial") else set()  # splits store their partial results in 16-byte accesses
        laid_out = LAID_OUT.fullmatch(plan.kernel.fn.__name__)
        if not laid_out and not {*plan.kinds.values()}.intersection((*WIDE, LINE.value)):
            assert {*facts["load"], *facts["store"]} <= sizes, f"{name}: {facts}"
        return
    reads = vectors(plan, ("x", "y", "z", "grad", "weight", "probabilities"))
    writes = vectors(plan, ("out", "dy", "dz", "dx", "dq"))
    assert reads or writes
    narrow = min(plan.dtypes[n].itemsize for n in reads + writes)
    # VEC: elements that a thread reads at once; rows across memory have fewer, in narrower accesses.
    least = min(plan.constants["VEC"] * narrow, 16)
    wide = {kind: sum(n for width, n in facts[kind].items() if width >= least) for kind in ("load", "store")}
    if plan.constants.get("PEEL"):  # unaligned rows, which are read in words
        wide["load"] = sum(n for width, n in facts["load"].items() if width >= 8)
    assert wide["load"] >= len(reads) and wide["store"] >= len(writes), f"{name}: {facts}"
    if " odd " not in name:  # an odd length's last tile is read element by element
        of_mask = plan.kinds.get("mask") == LINE.value or plan.dtypes.get("mask") and plan.constants["VEC"] == 2
        if narrow == 2 and not of_mask:  # else a thread reads the mask in accesses of two bytes
            picked = 2 if "target" in plan.kinds else 0  # each row's own logit
            written = 0
            if plan.kernel.fn is MULTI_MARGIN.fn:  # these are read per element, and written in the backward
                picked, written = 8 * picked, 2 if writes else 0
            single = facts["load"].get(2, 0) <= picked and facts["store"].get(2, 0) <= written
            assert single, f"{name}: single elements: {facts}"


def in_flight(plan, registers):
    """Returns the KiB that the resident blocks of one H200 multiprocessor load before they use the first byte."""
    read = [n for n in ("x", "probabilities", "y", "z", "mask", "weight") if plan.kinds.get(n) == VECTOR.value]
    tile = plan.constants["BM"] * plan.constants["BN"]
    blocks = min(2048 // plan.config.threads, 65536 // (-(-registers // 8) * 8 * plan.config.threads))
    return blocks * tile * sum(plan.dtypes[n].itemsize for n in read) / 1024


def line(target, name, plan, facts):
    accesses = "  ".join(f"{kind} {facts[kind]}" for kind in ("load", "store"))
    return f"{target:7} {name:38} {facts['registers']:4} registers  stack {facts['stack']}  {accesses}"


PLANS = (
    plans_statistics,
    plans_segments,
    plans_rows,
    plans_regions,
    plans_classification,
    plans_divergence,
    plans_info_nce,
)
FIRST, MORE = cases(), {name: plan for file in PLANS for name, plan in file.cases().items()}
CASES = FIRST | MORE


def compiled_for(target):
    """Returns the names of the plans to compile for an architecture. sm_90: all plans, except those of MORE in fp16 and
    fp32, which take bf16's paths. Other architectures: each path once, in bf16, and mse_loss and the sums in fp64 too.
    Of these, only `make test-all` compiles sm_90's dtypes other than bf16, and AMD, where no kernel runs yet."""
    often = re.compile(r"(?!aligned loss ).*(bf16|bfloat16)|aligned (mse|mean|sum)\S* float64")
    if target == "sm_90":
        narrow = re.compile(r".*\bfloat(16|32)\b")
        return [*(name for name in FIRST if "2^33" not in name or "bfloat16" in name),
                *(name for name in MORE if not narrow.fullmatch(name))]  # fmt: skip
    more = [name for name in MORE if any(file.OFTEN.fullmatch(name) for file in PLANS)]
    return [name for name in FIRST if often.fullmatch(name) and "odd mse" not in name] + more


pytestmark = pytest.mark.usefixtures("triton_cache")
NARROW = {"box_kernel", "nll_loss_kernel", "region_loss_kernel", "region_loss_backward_kernel"}
NARROW |= {f"info_nce{part}_kernel" for part in ("", "_units", "_slopes", "_gradients")}


def batches():
    """Yields (target, names of plans) in batches of a few seconds."""
    other = re.compile(r".*\b(float(16|32|64)|double)\b")
    for target in TARGETS:
        names = compiled_for(target)
        rest = [name for name in names if target == "gfx942" or target == "sm_90" and other.match(name)]
        sample = [name for name in names if name not in rest]
        for kind, part, marks in (("sample", sample, ()), ("rest", rest, pytest.mark.exhaustive)):
            for i in range(3 if part else 0):
                yield pytest.param(target, part[i::3], marks=marks, id=f"{target}-{kind}-{i}")


@pytest.mark.slow
@pytest.mark.parametrize("target, names", [*batches()])
def test_resources(target, names, tmp_path):
    for name in names:
        plan = CASES[name]
        result = report(plan, TARGETS[target], tmp_path)
        print(line(target, name, plan, result))
        check(name, plan, result)
        registers, _ = getattr(plan.constants.get("F"), "max_registers", (0, 0))
        by_memory = registers <= 80  # else arithmetic limits the op, not memory
        read = re.match(r"aligned ((odd )?(mse|mean|loss)(?!.*_back)|cross_entropy(_backward)? bfloat)", name)
        if by_memory and target == "sm_90" and read:
            assert in_flight(plan, result["registers"]) >= 48, name


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
def test_the_machine_code_has_the_accesses_of_the_ptx(target, tmp_path):
    """The assembler keeps the PTX's access widths, in one aligned plan of each kernel: so the other tests may read the
    PTX alone. Counts may differ, by unrolling and shared branches. Kernels that read single numbers are left out."""
    plans = {CASES[name].kernel.fn: CASES[name] for name in compiled_for(target) if name.startswith("aligned")}
    assert {kernel.fn.__name__ for kernel in KERNELS if kernel.fn not in plans} == NARROW
    for plan in plans.values():
        compiled = plan.compile(TARGETS[target])
        of_ptx, of_machine = ptx_accesses(compiled.asm["ptx"]), machine_accesses(compiled.asm["cubin"], tmp_path)
        least = min(2 * plan.constants.get("VEC", 8), 16)  # less than 16 for rows across memory
        assert max(width for _, width in of_ptx) >= least, plan.kernel.fn.__name__
        assert set(of_machine) == set(of_ptx), (plan.kernel.fn.__name__, sorted(set(of_ptx)), sorted(set(of_machine)))


@pytest.mark.parametrize("name", ["aligned mean bfloat16", "aligned columns bfloat16"])
def test_on_amd_a_block_counts_after_what_it_has_stored(name):
    """On AMD a block stores its partial results, waits at a barrier, writes back and waits, and only then counts itself
    as done; so the last block reads complete results. AMD's barrier does not wait for other waves' stores: one reason
    why a ROCm build runs the ops as composites."""
    assert CASES[name].constants["SPLIT"]
    text = CASES[name].compile(TARGETS["gfx942"]).asm["amdgcn"]
    steps = "global_store|s_barrier|buffer_wbl2 sc1|s_waitcnt vmcnt\\(0\\)|global_atomic_add|buffer_inv sc1"
    result = [step for step, _ in groupby(re.findall(rf"^\s*({steps})", text, re.MULTILINE))]
    count = result.index("global_atomic_add")
    assert result[count - 4 : count] == ["global_store", "s_barrier", "buffer_wbl2 sc1", "s_waitcnt vmcnt(0)"]
    assert result[count + 1 : count + 3] == ["s_waitcnt vmcnt(0)", "buffer_inv sc1"]


@pytest.mark.parametrize("name", ["info_nce 256", "info_nce_slopes 256", "stepped info_nce 256", "info_nce_slopes 320"])
def test_products_are_asynchronous_and_of_whole_warpgroups(name, tmp_path):
    """Matrix products copy their operands to shared memory asynchronously, 16 bytes at a time, and multiply by HGMMA,
    the instruction of whole warpgroups."""
    compiled = CASES[f"general {name} bfloat16"].compile(TARGETS["sm_90"])
    assert compiled.metadata.shared <= 227 * 1024
    file = tmp_path / "kernel.cubin"
    file.write_bytes(compiled.asm["cubin"])
    code = nvidia("nvdisasm", "-c", file)
    copies = re.findall(r"\bLDGSTS\.E\S*", code)
    assert "HGMMA" in code and sum("128" in copy for copy in copies) >= 16
    assert not re.search(r"\b(LDL|STL)\b", code)


def lanes_of_sums(plan):
    """Returns the operand types of the reductions over threads, with their layouts spelled out."""
    text = plan.compile(TARGETS["sm_90"]).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.MULTILINE))
    operands = re.findall(r"\}\) : \((tensor<.*?)\) -> ", text)
    return {re.sub(r"#\w+", lambda name: layouts.get(name.group(), name.group()), operand) for operand in operands}


@pytest.mark.parametrize("columns", [128256, 50257])
@pytest.mark.parametrize("make", [plans_rows.forward, plans_rows.backward])
def test_blocks_that_share_a_row_sum_it_in_the_same_lanes(make, columns):
    """Few rows (several blocks share one) and many rows take different binaries. Both sum in the same lanes: else a
    row's result would depend on the number of rows."""
    few, many = (make(plans_rows.SOFTMAX, meta((M, columns), BF16)) for M in (1, 5000))
    assert few.constants["SPLIT"] and not many.constants["SPLIT"]
    assert lanes_of_sums(few) == lanes_of_sums(many) and lanes_of_sums(few)


def test_class_indices_are_handed_on_as_they_are_read():
    """The class indices of a tile's pixels pass through shared memory once, not as one comparison per class: a block
    needs 4 bytes of shared memory per pixel."""
    plan = CASES["aligned regions indices bfloat16"]
    assert plan.compile(TARGETS["sm_90"]).metadata.shared <= 4 * plan.constants["BN"]


def test_every_kernel_is_covered():
    assert {plan.kernel.fn for plan in CASES.values()} == {kernel.fn for kernel in KERNELS}
    used = {plan.constants.get("F") for plan in CASES.values()}
    for module in (mse_loss, *LOSSES):
        for pair in formulas(module).values():
            assert set(pair) <= used
    for file in PLANS:
        file.covered(CASES.values())


def test_every_launcher_is_where_its_op_says():
    """Every launcher can be imported under the name that its op gives. Without this test only a CUDA tensor imports
    it."""
    launchers = library.launchers.values()
    assert len(launchers) >= 20
    for launcher in launchers:
        module = importlib.import_module(f"safeops.kernels.{launcher.module}")
        assert callable(getattr(module, launcher.name)), launcher.name


def test_indices_are_as_wide_as_they_must_be():
    for name, plan in CASES.items():
        if "space" not in plan.signature:  # kernels for a few thousand numbers have no 64-bit variant
            continue
        assert plan.signature["space"].N == ("i64" if "2^33" in name or "wide" in name else "i32"), name


def test_blocks_have_the_registers_that_they_ask_for():
    """No plan asks for more registers per block than there are: the driver would refuse it. test_plans.py has more row
    lengths."""
    for name, plan in CASES.items():
        for target in list(TARGETS.values())[:4]:
            options = plan.options(target)
            assert -(-options.get("maxnreg", 0) // 8) * 8 * 32 * options["num_warps"] <= 65536, name


@pytest.fixture
def compiled(monkeypatch):
    """A list of the plans that reach the compiler, which is replaced."""
    results = []
    monkeypatch.setattr(launch.Plan, "compile", lambda plan, target: results.append(plan) or plan)
    monkeypatch.setattr(launch, "starter", lambda binary, index, places: None)
    monkeypatch.setattr(launch, "gpu_target", lambda index: TARGETS["sm_90"])
    monkeypatch.setattr(launch, "_binaries", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return results


def test_new_sizes_load_nothing_new(compiled):
    """New sizes do not compile or load a kernel: else training with new sequence lengths would do so at every step."""
    grad = mse_loss.slope
    for rows in range(65, 97):
        x = meta((rows, 4096), BF16)
        mapped(grad, x, x).loaded(0)
    assert len(compiled) == 1
    mapped(grad, meta((65, 4096), F32), meta((65, 4096), F32)).loaded(0)
    assert len(compiled) == 2


def test_a_new_kernel_is_refused_while_a_graph_is_captured(compiled, monkeypatch):
    loaded, new = meta((64, 4096), BF16), meta((64, 4096), F32)
    mapped(mse_loss.slope, loaded, loaded).loaded(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    mapped(mse_loss.slope, loaded[:32], loaded[:32]).loaded(0)  # a new size of a loaded kernel
    with pytest.raises(RuntimeError, match="elementwise_kernel .* run the step once before"):
        mapped(mse_loss.slope, new, new).loaded(0)
    assert len(compiled) == 1


def test_each_stream_has_buffers_of_its_own(monkeypatch):
    """Each stream has its own buffers, since two streams may run at once. A graph, which may be replayed on any stream,
    allocates its own at capture."""
    stream, device = [1], torch.device("cpu")
    monkeypatch.setattr(buffers, "_buffers", {})
    monkeypatch.setattr(buffers, "current_stream", lambda index: stream[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stream[0] == 3)
    first = buffers.split_buffers(0, device)
    assert buffers.split_buffers(0, device) is first and not first[1].any()
    stream[0] = 2
    other = buffers.split_buffers(0, device)
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, other))
    stream[0] = 3
    assert buffers.split_buffers(0, device) is None


def test_plans_of_one_binary_are_compiled_alike():
    """Plans with one key (`variant`) compile to one binary: the key contains all that the binary depends on."""
    variants = {}
    for name, plan in CASES.items():
        inputs = plan.kernel, plan.signature, plan.constants, plan.kinds, plan.attrs, plan.config
        other, before = variants.setdefault(plan.variant(), (name, inputs))
        assert inputs == before, (name, other)
    assert len(variants) > len(CASES) // 2


def test_a_spill_is_caught(tmp_path):
    x = meta(FLAT, BF16)
    plan = reduced(mse_loss.value, x, x, meta(FLAT, torch.bool), x)
    plan.config = Config(max_registers=(32, 32))
    with pytest.raises(AssertionError, match="stack or spills"):
        check("planted", plan, report(plan, TARGETS["sm_90"], tmp_path))


def test_single_element_accesses_are_caught(tmp_path):
    plan = CASES["general transposed mse bfloat16"]
    plan.kinds |= {"x": VECTOR.value, "y": VECTOR.value}  # the plan claims wide accesses that its strides do not allow
    result = report(reduced(mse_loss.value, meta(FLAT, BF16, (2,))), TARGETS["sm_90"], tmp_path)
    with pytest.raises(AssertionError, match="aligned planted"):
        check("aligned planted", plan, result)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for target in sys.argv[1:] or TARGETS:
            for name in compiled_for(target):
                plan = CASES[name]
                print(line(target, name, plan, report(plan, TARGETS[target], Path(folder))), flush=True)

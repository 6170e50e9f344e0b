"""The GPU model reads machine code correctly, and no kernel's predicted share of the copy bandwidth falls below its
share in docs/gpu-model.md."""

import re

import pytest

pytest.importorskip("triton")

from safeops.kernels.engine import tiling

from benchmarks import gpu_model, machine_code
from benchmarks.machine_code import Code, Work
from tests.kernels import modelled_cuda
from tests.kernels.cuda_sources import BINARY, UNARY, needs_compilers
from tests.kernels.test_cuda_build import needs_library

modelled = pytest.importorskip("tests.kernels.modelled")
H200 = gpu_model.GPUS["H200"]
# Raw ops without a prediction: their time depends on the indices (colliding atomics, a sort).
ADDED_UP = "_safe_gather_backward", "_safe_index_select_backward"
SLACK = 0.02  # a share may fall by this: the table is rounded, and assemblers differ


def test_the_path_is_that_of_a_whole_tile():
    """The path through the machine code is that of a whole tile: it leaves out the code for a tile's edge, and exits as
    soon as it can."""
    rows = (
        (0x00, "@P0 EXIT", ""), (0x10, "LDG.E.128", "R0"), (0x20, "@P1 BRA", "0x60"),
        (0x30, "IMAD", "R1"), (0x40, "IMAD", "R1"), (0x50, "BRA", "0x70"), (0x60, "FADD", "R1"),
        (0x70, "@P2 BRA", "0x10"), (0x80, "@P3 EXIT", ""), (0x90, "MUFU.LG2", "R2"), (0xA0, "EXIT", ""),
    )  # fmt: skip
    listing = "\n".join(f"/*{at:04x}*/ {op} {operands} ;" for at, op, operands in rows)
    once, loops = machine_code.main_path(listing)
    (loop,) = loops
    assert loop.counts == {"lsu": 1, "issue": 2, "fma": 1} and loop.load == 16
    assert once.counts == {"issue": 2}


def test_passes_are_those_that_are_told():
    """A loop inside a tile counts as many times as `passes` says, and the path leaves out the instructions in
    `avoid`."""
    rows = (
        (0x00, "@P0 BRA", "0x30"), (0x10, "SHF.R.U64", "R1"), (0x20, "LDG.E.128", "R0"),
        (0x30, "LDG.E.128", "R0"), (0x40, "FADD", "R1"), (0x50, "@P1 BRA", "0x30"), (0x60, "EXIT", ""),
    )  # fmt: skip
    listing = "\n".join(f"/*{at:04x}*/ {op} {operands} ;" for at, op, operands in rows)
    path, _ = machine_code.main_path(listing, {16: 10}, avoid=r"SHF")
    assert path.counts == {"issue": 12, "lsu": 10, "fma": 10} and path.load == 16 and path.waits == 10
    path, _ = machine_code.main_path(listing, {16: 10})
    assert path.counts == {"issue": 12, "alu": 1, "lsu": 11, "fma": 10} and path.load == 32


def test_a_loop_is_avoided():
    rows = (
        (0x00, "@P0 BRA", "0x40"), (0x10, "LDG.E.128", "R0"), (0x20, "@P1 BRA", "0x10"), (0x30, "EXIT", ""),
        (0x40, "FADD", "R1"), (0x50, "EXIT", ""),
    )  # fmt: skip
    listing = "\n".join(f"/*{at:04x}*/ {op} {operands} ;" for at, op, operands in rows)
    path, _ = machine_code.main_path(listing, {16: 3})
    assert path.counts == {"issue": 5, "lsu": 3}
    path, _ = machine_code.main_path(listing, {16: machine_code.AVOIDED})
    assert path.counts == {"issue": 2, "fma": 1}


LOAD = gpu_model.Load(1 << 26, 1 << 14, 1 << 12, 256, 1 << 13, 1 << 27, 0, 0, 0)
FEW, MANY = Work({"lsu": 2, "alu": 60}, load=32), Work({"lsu": 2, "alu": 600}, load=32)


def share(loop=FEW, registers=32, **load):
    return gpu_model.predict(Code(Work(), [loop], registers, 0), LOAD._replace(**load), H200)


def test_what_bounds_a_kernel():
    assert share().share == 1 and share().bound == "bytes"
    assert share(MANY).share < 0.5 and share(MANY).bound == "instructions"
    assert share(registers=255).share < 0.5 and share(registers=255).bound == "in flight"
    assert share(rounds=10).time == pytest.approx(share().time + 10 * H200.latency)


@pytest.mark.slow
def test_no_share_falls(triton_cache):
    recorded = modelled.recorded()
    fell = {}
    for place, (size, n) in enumerate(modelled.SIZES.items()):
        plans = modelled.cases(n)
        assert set(plans) <= set(recorded), "make gpu-model"
        plans = {name: plan for name, plan in plans.items() if name[3] == "bf16"}
        for name, (_, _, result) in modelled.predictions(H200, plans).items():
            if result.share < recorded[name][place] - SLACK:
                fell[(size, *name)] = recorded[name][place], result.share
    assert not fell


@pytest.fixture(scope="module")
def launches():
    return modelled_cuda.Plans()


@needs_library
@needs_compilers
@pytest.mark.slow
def test_no_share_of_a_cuda_kernel_falls(launches):
    recorded, fell = modelled.recorded(), {}
    for place, (size, n) in enumerate(modelled.SIZES.items()):
        plans = modelled_cuda.cases(n, launches)
        assert set(plans) | set(modelled.cases(n)) == set(recorded), "make gpu-model"
        for name, (_, _, result) in modelled_cuda.predictions(H200, plans).items():
            if result.share < recorded[name][place] - SLACK:
                fell[(size, *name)] = recorded[name][place], result.share
    assert not fell
    sources = "".join(path.read_text() for path in modelled_cuda.CUDA.rglob("*.cu"))
    ops = {*re.findall(r'm.impl\("(\w+)"', sources), *(f"_{op}" for op in (*UNARY, *BINARY))}
    assert ops - launches.defined == {"_pick_", *ADDED_UP}


@pytest.mark.slow
def test_a_slower_plan_is_noticed(monkeypatch, triton_cache):
    """A plan that adds up its partial results in smaller groups falls below the recorded share, and so fails the
    test."""
    monkeypatch.setattr(tiling, "POLICY", tiling.POLICY._replace(partials=32))
    name = "mse_loss", "forward", "flat", "bf16"
    _, _, result = modelled.predictions(H200, {name: modelled.cases(1 << 26)[name]})[name]
    assert result.share < modelled.recorded()[name][0] - SLACK

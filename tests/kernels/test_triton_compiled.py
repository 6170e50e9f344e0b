"""The planned kernels, compiled by Triton 3.6.0 (of torch 2.11) and by the pinned Triton, have none of the faults of
compiled.py, and every functor compiles in every dtype. Planted kernels show that each check finds its fault.
"""

import importlib.metadata
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles: needs Triton without TRITON_INTERPRET", allow_module_level=True)

from safeops.kernels.engine.indexing import ALL
from safeops.kernels.vectors.triplet_margin_loss import triplet_kernel as TRIPLET

from tests.kernels import compiled
from tests.kernels.plans_layouts import functors, layouts
from tests.kernels.plans_statistics import BF16, F16, F32, F64
from tests.kernels.test_triton_build import CASES, TARGETS

PINNED = importlib.metadata.version("triton")
OLD = re.search(r"triton==(.*)", (compiled.ROOT / "requirements-triton.txt").read_text())[1]
FOLDERS = {OLD: Path(sys.prefix) / "oldest-triton", PINNED: None}
GPU = TARGETS[f"sm_{compiled.ARCH}"]
BATCHES = 2  # per test, so that two workers share the work
LONG = 16  # batches of the test that compiles all kernels

pytestmark = pytest.mark.usefixtures("triton_cache")


def ask(version, requests, stage):
    folder = FOLDERS[version]
    if folder and not folder.exists():
        pytest.skip(f"there is no {folder} with Triton {version}: make test-kernels installs it")
    said, result = compiled.ask(requests, stage, folder)
    assert said == version and len(result) == len(requests) > 0
    return result


def asked(version, plans, stage):
    """Returns {name: faults} of the plans that have faults, compiled up to `stage` by this version of Triton."""
    encoded = compiled.gpu_kernels().encoded
    requests = [encoded(plan.source(), plan.options(GPU)) for plan in plans.values()]
    return {name: faults for name, faults in zip(plans, ask(version, requests, stage)) if faults}


@cache
def planned():
    """Returns {name: plan} with one plan for each binary. Functors that tests declare are left out."""
    results = {}
    for name, plan in (CASES | layouts()).items():
        if getattr(plan.constants.get("F"), "__module__", "safeops").startswith("safeops"):
            results.setdefault(plan.variant(), (name, plan))
    return dict(results.values())


def sample():
    """Returns {name: plan} with one plan for each choice of: kernel, axis, element by element or not, operation, rows
    at any address, tiles with less than a full access per thread, tiles of one element, and (triplets only, whose sums
    differ) the compute dtype."""
    results = {}
    for name, plan in planned().items():
        constants = plan.constants
        axis, single = constants.get("AXIS"), constants["VEC"] == 1
        which = constants.get("MODE") if axis == ALL.value else constants.get("OP")
        small = "LM" in constants and constants["BM"] * constants["BN"] < plan.config.threads * constants["VEC"]
        lone = "BM" in constants and constants["BM"] * constants["BN"] == 1
        kind = small and not single, lone, plan.kernel.fn is TRIPLET and str(constants["C"])
        results.setdefault((plan.kernel.fn, axis, single, which, constants.get("PEEL"), *kind), (name, plan))
    return dict(results.values())


def part(plans, batch, batches):
    return dict(list(plans.items())[batch::batches])


# ---- the checks find planted faults


def planted(name, version, stage, dtype="fp32"):
    signature = {"x": f"*{dtype}", "out": f"*{dtype}", "stride": "i32", "config": ["constexpr", "constexpr"]}
    options = {"num_warps": 8, "enable_fp_fusion": True}
    constants = [[(3, 0), 8], [(3, 1), 64]]
    request = {"kernel": f"tests.kernels.planted:{name}", "signature": signature, "constants": constants, "attrs": []}
    (results,) = ask(version, [request | {"options": options}], stage)
    return {fault.partition(":")[0] for fault in results}


@pytest.mark.slow
@pytest.mark.parametrize("version", FOLDERS)
def test_planted_faults_are_found(version):
    assert planted("apart", version, "ttgir") == {"gaps", "crosswise"}
    assert planted("near", version, "ttgir") == set()
    assert planted("products", version, "cubin") == planted("products", version, "cubin", "fp64") == {"fused"}
    assert planted("rounded", version, "cubin") == planted("rounded", version, "cubin", "fp64") == set()
    assert planted("alike", version, "ttir") == {"alike"} and planted("unlike", version, "ttir") == set()


@pytest.mark.slow
def test_what_does_not_compile_is_found():
    assert planted("behind", OLD, "ttir") == set()
    assert planted("behind", OLD, "ttir", "fp64") == {"does not compile"}


def test_layouts_are_read():
    """`bases` reads layouts right: a slice has its parent's lanes, and lanes and warps beyond the tile hold copies,
    with step 0."""
    by_name = compiled.layouts(
        "#a = #ttg.blocked<{sizePerThread = [1, 2], threadsPerWarp = [4, 8], warpsPerCTA = [2, 1], order = [1, 0]}>\n"
        "#b = #ttg.linear<{register = [], lane = [[0, 1], [8, 0]], warp = [[0, 0]], block = []}>\n"
    )
    lanes = [[0, 2], [0, 4], [0, 8], [1, 0], [2, 0]]
    assert compiled.bases("#a", (8, 16), by_name) == {"register": [[0, 1]], "lane": lanes, "warp": [[4, 0]]}
    assert compiled.bases("#a", (4, 8), by_name)["lane"] == [[0, 2], [0, 4], [0, 0], [1, 0], [2, 0]]
    cut = compiled.bases("#ttg.slice<{dim = 1, parent = #a}>", (8,), by_name)
    assert cut == {"register": [[0]], "lane": [[0], [0], [0], [1], [2]], "warp": [[4]]}
    assert compiled.bases("#b", (16, 2), by_name) == {"register": [], "lane": [[0, 1], [8, 0]], "warp": [[0, 0]]}


def test_what_is_sent_is_followed():
    """`fused` follows a value from another lane through moves and into fp64 numbers (two registers), until it is
    overwritten."""

    def fusions(*rows):
        return len(compiled.fused("\n".join(f"/*{16 * i:04x}*/ {row} ;" for i, row in enumerate(rows))))

    sent, fma = "SHFL.BFLY PT, R7, R6, 0x10, 0x1f", "FFMA R0, R5, R5, R7"
    for rows in (fma,), ("MOV R9, R7", "FFMA R0, R5, R5, -R9"), ("DFMA R2, R4, R4, R6",), ("STG.E [R2.64], R7", fma):
        assert fusions(sent, *rows) == 1
        assert fusions(*rows) == 0
    for rows in (
        ("FFMA R0, R7, R7, R5",),
        ("FADD R7, R1, R2", fma),
        ("LDS.64 R6, [R9]", fma),
        ("F2F.F64.F32 R6, R6", "DFMA R2, R4, R4, R6"),
        ("DFMA R2, R4, -R4, R6",),  # the remainder of a division, which is exact
        ("DFMA.RP R2, R4, R4, R6",),
    ):
        assert fusions(sent, *rows) == 0


# ---- the planned kernels have no fault


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("version", FOLDERS)
def test_a_sample_has_no_faults(version, batch):
    assert not asked(version, part(sample(), batch, BATCHES), "cubin")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", range(LONG))
@pytest.mark.parametrize("version", FOLDERS)
def test_no_kernel_has_faults(version, batch):
    assert not asked(version, part(planned(), batch, LONG), "cubin")


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", [BF16, F64, *(pytest.param(dtype, marks=pytest.mark.exhaustive) for dtype in (F16, F32))], ids=str
)
def test_every_functor_compiles(dtype):
    assert not asked(OLD, functors(dtype), "ttir")


def test_the_options_say_what_is_fused():
    assert {plan.options(target)["enable_fp_fusion"] for plan in CASES.values() for target in TARGETS.values()} == {
        True
    }

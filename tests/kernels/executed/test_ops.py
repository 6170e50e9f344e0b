"""Every op, executed as Triton compiles it, agrees with its fp64 definition in values and gradients, and passes the
executor's checks in several orders of blocks and warps.

`make test-kernels` runs all ops in bf16 and fp32, compiled by one of the two Tritons (the pinned and the oldest), and
rows of several tiles compiled by the second. `make test-all` runs both, every dtype, and the contract's clauses on
numbers and layouts."""

import itertools
import warnings

import pytest

pytest.importorskip("triton")

from safeops.testing import NotApplicable, run_check
from tests.kernels.executed import compiling
from tests.kernels.executed.handwritten import needs_compiler
from tests.kernels.executed.launching import executed, on_launchers
from tests.kernels.executed.subjects import BF16, F16, F32, F64, assert_agrees, launched, resized, rows_of
from tests.ops.record import firsts

# xdist_group: one worker compiles the executor
pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.xdist_group("machine")]
SUBJECTS = launched()
FIRSTS = [name for name in SUBJECTS if name in firsts(lambda record: record.name in SUBJECTS)]
BY_ROWS = [name for name, subject in SUBJECTS.items() if rows_of(subject) and name != "box_iou_loss"]
# ODD and LONG rows begin at no multiple of 16 bytes; LONG ones take several tiles. (A box has only 4 numbers.)
ODD, LONG = 1001, 9001


@pytest.fixture(params=["pinned", "oldest"])
def version(request):
    result = getattr(compiling, request.param)()
    folder = compiling.folder_of(result)
    if folder and not folder.exists():
        pytest.skip(f"there is no {folder} with Triton {result}: make test-kernels installs it")
    return result


def run_all(calls, **options):
    """Run the calls; at least one must launch a kernel. calls: (subject, sample, dtype, options of assert_agrees)."""
    launches = []
    for subject, sample, dtype, more in calls:
        try:
            launches += assert_agrees(subject, sample, dtype, **options, **more)
        except NotApplicable:
            continue
    assert launches
    return launches


def by_one(names, first):
    """Returns a case for each op and Triton. `make test-kernels` runs one Triton per op, alternating from op to op;
    `first` is the first op's. The other cases run in `make test-all`."""
    for name in names:
        least = ("pinned", "oldest")[(list(SUBJECTS).index(name) + (first == "oldest")) % 2]
        for version in ("pinned", "oldest"):
            yield pytest.param(name, version, marks=() if version == least else pytest.mark.exhaustive)


@pytest.mark.parametrize("name, version", by_one(SUBJECTS, "pinned"), indirect=["version"])
def test_every_op(name, version):
    """Each op agrees with its definition on all its samples, alternately in bf16 and fp32. Approximate instructions are
    exact, or as far off as the ISA allows."""
    subject, dtypes = SUBJECTS[name], (BF16, F32) if version == compiling.pinned() else (F32, BF16)
    run_all(
        ((subject, sample, dtypes[i % 2], {"bias": (0, 1, -1)[i % 3]}) for i, sample in enumerate(subject.samples)),
        version=version,
    )


@pytest.mark.parametrize("name, version", by_one(BY_ROWS, "oldest"), indirect=["version"])
def test_rows_of_several_tiles(name, version):
    subject = SUBJECTS[name]
    sample, dtypes = (
        next(iter(rows_of(subject).values())),
        (BF16, F32) if version == compiling.oldest() else (F32, BF16),
    )
    lengths = zip((ODD, LONG), dtypes)
    run_all(((subject, resized(sample, 3, length), dtype, {}) for length, dtype in lengths), version=version)


@pytest.mark.parametrize("name, arch", list(zip(FIRSTS, itertools.cycle([80, 100, 120]))))
def test_other_architectures(name, arch):
    subject = SUBJECTS[name]
    run_all([(subject, subject.samples[0], F32, {})], arch=arch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("name", SUBJECTS)
def test_every_dtype(name, dtype, version):
    subject = SUBJECTS[name]
    run_all(((subject, sample, dtype, {}) for sample in subject.samples), version=version)


CLAUSES = "mixed_dtypes partial_gradients masked_garbage masked_upstream weight_zero kept_nonfinite kept_upstream "
CLAUSES += "nothing_kept layouts upstream_layouts sizes inputs_unchanged"


@pytest.mark.exhaustive
@pytest.mark.parametrize("clause", CLAUSES.split())
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_contract(name, clause):
    if reason := SUBJECTS[name].skip.get(clause):
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about broadcast operands, which are intended here
        with executed(orders=1) as launches, on_launchers():
            run_check(SUBJECTS[name], clause)
    assert launches

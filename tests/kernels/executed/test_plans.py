"""Results are right for the row lengths on both sides of each change of plan, and the executor knows the instructions
of all planned kernels."""

import pytest

pytest.importorskip("triton")

from safeops.testing import run
from tests.kernels.executed import compiling, machine
from tests.kernels.executed.handwritten import needs_compiler
from tests.kernels.executed.launching import on_launchers, planned
from tests.kernels.executed.subjects import BF16, F32, assert_agrees, resized, rows_of
from tests.kernels.executed.test_ops import BY_ROWS, SUBJECTS, version  # noqa: F401  (a fixture)

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.exhaustive]
LONGEST, BATCHES = 1 << 16, 8


def boundaries(variants, step):
    """Returns the lengths n, multiples of `step`, for which variants(n) != variants(n + step)."""
    results, powers = [], [step << k for k in range((LONGEST // step).bit_length())]
    for low, high in zip(powers, powers[1:]):
        if variants(low) == variants(high):
            continue
        while high - low > step:
            middle = (low + high) // 2 // step * step
            low, high = (middle, high) if variants(low) == variants(middle) else (low, middle)
        results.append(low)
    return results


# odd = 0: rows start at multiples of 16 bytes; odd = 1: rows are one element longer, and do not.
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", BY_ROWS)
def test_both_sides_of_each_boundary(name, dtype, odd, version):  # noqa: F811
    subject = SUBJECTS[name]
    sample = next(iter(rows_of(subject).values()))

    def variants(n):
        plans = []
        with planned(lambda plan, *_: plans.append(plan.variant())), on_launchers():
            run(subject.op, resized(sample, 3, n + odd).cast(dtype), grad=False, keys=())
        return plans

    for n in boundaries(variants, 16):
        for length in (n + odd, n + 16 + odd):
            assert_agrees(subject, resized(sample, 3, length), dtype, version=version)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_planned_kernel_is_known(batch, version):  # noqa: F811
    from tests.kernels.test_triton_compiled import planned as plans

    for plan in list(plans().values())[batch::BATCHES]:
        machine.Program(compiling.compiled(plan, 90, version).ptx)

"""A training step under each kind of parallelism, and shift_labels, on several processes."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import matrix, processes  # noqa: E402

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]
outcomes = processes.fixture(matrix)


@pytest.mark.parametrize("case", matrix.CASES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

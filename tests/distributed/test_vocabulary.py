"""linear_cross_entropy on DTensors, on several processes: values, gradients, bytes on the wire and their order."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import processes, vocabulary  # noqa: E402

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]
outcomes = processes.fixture(vocabulary)


@pytest.mark.parametrize("case", vocabulary.CASES)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

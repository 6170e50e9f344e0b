"""debug.recorder on several processes."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import processes, recording  # noqa: E402

WORLDS = [2, pytest.param(4, marks=pytest.mark.exhaustive)]
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]
outcomes = processes.fixture(recording)


@pytest.mark.parametrize("case", recording.CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

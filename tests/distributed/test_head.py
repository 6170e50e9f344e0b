"""head_loss of heads that are sharded or replicated, on several processes."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import head, processes  # noqa: E402

pytestmark = pytest.mark.slow
WORLDS = [2, pytest.param(4, marks=[pytest.mark.exhaustive])]
outcomes = processes.fixture(head)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", head.CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

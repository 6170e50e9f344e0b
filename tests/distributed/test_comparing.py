"""debug.sketch and debug.compare on several processes, beside one process with the whole batch."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import comparing, processes  # noqa: E402

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]
outcomes = processes.fixture(comparing)


@pytest.mark.parametrize("case", comparing.CASES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

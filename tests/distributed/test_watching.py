"""debug.trace and debug.audit on several processes: one report, which names the rank."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import processes, watching  # noqa: E402

WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
pytestmark = pytest.mark.xdist_group("ranks")
found = processes.fixture(watching)


@pytest.mark.parametrize("case", watching.CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_on_several_processes(found, world, case):
    if wrong := processes.failure(found(world), case):
        pytest.fail(wrong)

"""Ranks that make different calls, on several processes: all raise one error, which says how the calls differ."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from safeops.core.op import registry  # noqa: E402
from tests.distributed import agreement, processes  # noqa: E402

WORLDS = [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.exhaustive])]
pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(not all(op.cpu for op in registry.values()), reason="needs the kernels"),
]
outcomes = processes.fixture(agreement)


@pytest.mark.parametrize("case", agreement.CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

"""Reductions over a sharded dim, and vectors along one, computed from partial results, on several processes."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from safeops.core.op import registry  # noqa: E402
from tests.distributed import partials, processes  # noqa: E402

WORLDS = [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.exhaustive])]
pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.skipif(not all(op.cpu for op in registry.values()), reason="needs the kernels"),
]
outcomes = processes.fixture(partials)


@pytest.mark.parametrize("case", partials.CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

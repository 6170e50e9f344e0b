"""cross_entropy and nll_loss on DTensors, on several processes: values, gradients and bytes on the wire."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from safeops.core.op import registry  # noqa: E402
from tests.distributed import classes, processes  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.slow,
    pytest.mark.skipif(not registry["cross_entropy"].cpu, reason="needs the kernels"),
]
outcomes = processes.fixture(classes)


@pytest.mark.parametrize("case", classes.CASES)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

"""The divergences of rows of logits on DTensors, on several processes: values, gradients and bytes on the wire."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from safeops.core.op import registry  # noqa: E402
from tests.distributed import divergences, processes  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.slow,
    pytest.mark.skipif(not registry["js_div_with_logits"].cpu, reason="needs the kernels"),
]
outcomes = processes.fixture(divergences)


@pytest.mark.parametrize("case", divergences.CASES)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

"""Log-probabilities and divergences after a linear layer of DTensors, on several processes: values, gradients, bytes on
the wire, and no logits of all classes of a rank."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from safeops.core.op import registry  # noqa: E402
from tests.distributed import linear, processes  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.slow,
    pytest.mark.skipif(not registry["js_div_with_logits"].cpu, reason="needs the kernels"),
]
outcomes = processes.fixture(linear)


@pytest.mark.parametrize("case", linear.CASES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

"""Ops on DTensors by their local kernels, on several processes: values, gradients, layouts and bytes on the wire."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from safeops.core.op import registry  # noqa: E402
from tests.distributed import dtensors, processes  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.slow,
    pytest.mark.skipif(not all(op.cpu for op in registry.values()), reason="needs the kernels"),
]
outcomes = processes.fixture(dtensors)


@pytest.mark.parametrize("case", dtensors.CASES)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)


def test_which_are_covered():
    assert set(dtensors.COVERED.values()) == {
        *("elementwise", "loss", "rows", "vocabulary", "log_probs", "divergence"),
        *("linear_log_probs", "linear_divergence"),
        *("sum", "mean", "statistic", "count"),
        *("softmax", "normalize", "cosine"),
    }
    assert {"safe_exp", "safe_div", "masked_fill", "mse_loss", "gaussian_nll_loss", "masked_mean"} < set(
        dtensors.COVERED
    )

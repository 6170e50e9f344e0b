"""grad_norm and clip_grad_norm_ of gradients that are DTensors, on several processes."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import gradients, processes  # noqa: E402

WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
outcomes = processes.fixture(gradients)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", gradients.CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)

"""Losses of policies on two ranks: gradients of one process."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import policies, processes  # noqa: E402

outcomes = processes.fixture(policies)


@pytest.mark.xdist_group("ranks")
@pytest.mark.slow
@pytest.mark.parametrize("case", policies.CASES)
def test_as_one_process(outcomes, case):
    if wrong := processes.failure(outcomes(2), case):
        pytest.fail(wrong)

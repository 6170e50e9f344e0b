"""The contract's samples of every op on DTensors of two processes: values and gradients of one process."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import contract, processes  # noqa: E402

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]
outcomes = processes.fixture(contract)


@pytest.mark.parametrize("case", contract.CASES)
def test_as_one_process(outcomes, case):
    if wrong := processes.failure(outcomes(2), case):
        pytest.fail(wrong)

"""Losses of routers on two ranks: gradients of one process."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import processes, routers  # noqa: E402

outcomes = processes.fixture(routers)


@pytest.mark.xdist_group("ranks")
@pytest.mark.slow
@pytest.mark.parametrize("case", routers.CASES)
def test_as_one_process(outcomes, case):
    if wrong := processes.failure(outcomes(2), case):
        pytest.fail(wrong)

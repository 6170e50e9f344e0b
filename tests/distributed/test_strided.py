"""Operands with strided shards, on several processes: values and gradients of one process."""

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from safeops.core.op import registry  # noqa: E402
from tests.distributed import processes, strided  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.slow,
    pytest.mark.skipif(not all(op.cpu for op in registry.values()), reason="needs the kernels"),
]
outcomes = processes.fixture(strided)


@pytest.mark.parametrize("case", strided.CASES)
def test_on_a_mesh_of_two_by_two(outcomes, case):
    if wrong := processes.failure(outcomes(4), case):
        pytest.fail(wrong)

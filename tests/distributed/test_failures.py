"""Collectives that fail, on two processes: errors by name, within the group's timeout, and nothing half-written."""

import signal

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from safeops.core.op import registry  # noqa: E402
from tests.distributed import failures, processes  # noqa: E402

pytestmark = [
    pytest.mark.xdist_group("ranks"),
    pytest.mark.slow,  # cases wait for timeouts
    pytest.mark.skipif(not all(op.cpu for op in registry.values()), reason="needs the kernels"),
]
outcomes = processes.fixture(failures)


@pytest.mark.parametrize("case", failures.CASES)
def test_on_several_processes(outcomes, case):
    if wrong := processes.failure(outcomes(2), case):
        pytest.fail(wrong)


def test_a_rank_that_is_killed(tmp_path):
    ranks = processes.started(failures.killed, 2, tmp_path / "store", tmp_path / "seen")
    for process in ranks.processes:
        process.join(60)
    assert [process.exitcode for process in ranks.processes] == [0, -signal.SIGKILL]
    assert (tmp_path / "seen").read_text() == "named"

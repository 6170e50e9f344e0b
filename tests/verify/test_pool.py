"""If a worker dies, hangs or fails, its op is blamed, and no other op's result is lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from safeops.verify.pool import FAILED, PASSED, UNKNOWN, Pool

WORKER = Path(__file__).with_name("scripted_worker.py")
ENDS = {
    "segfault": (FAILED, "layouts: killed by SIGSEGV"),
    "abort": (FAILED, "layouts: killed by SIGABRT: terminate called after throwing"),
    "leave": (FAILED, "layouts: exit status 3"),
    "leave quietly": (FAILED, "layouts: exit status 0"),
    "out of memory": (UNKNOWN, "layouts: killed by SIGKILL"),
    "what": (FAILED, "layouts: killed by SIGABRT: what():  CUDA error: misaligned address"),
    "hang": (UNKNOWN, "layouts: no answer for 1 s"),
    "wrong": (FAILED, "layouts: 1 of 4 wrong"),
    "illegal": (FAILED, "layouts: an illegal memory access"),
    "memory": (UNKNOWN, "layouts: out of memory: 2 GiB wanted"),
}


def run(ops, tmp_path, jobs):
    """Returns ({op: result}, the number of workers)."""
    log = tmp_path / "workers"
    results = list(Pool(ops, [sys.executable, str(WORKER), str(log)], jobs, seconds=1))
    assert sorted(result.op for result in results) == sorted(ops)
    return {result.op: result for result in results}, len(log.read_text().split())


@pytest.mark.parametrize("jobs", [1, 3])
def test_each_end_costs_its_own_op(jobs, tmp_path):
    between = [f"right {i}" for i in range(len(ENDS))]
    result, workers = run([op for pair in zip(ENDS, between) for op in pair], tmp_path, jobs)
    for op, (verdict, why) in ENDS.items():
        assert (result[op].verdict, result[op].why) == (verdict, why)
        assert result[op].checks == {"value": (0.5, 3)}
    for op in between:
        assert (result[op].verdict, result[op].why, len(result[op].checks)) == (PASSED, "", 2)
    ended = set(ENDS) - {"wrong", "memory"}
    assert len(ended) + 1 <= workers <= len(ended) + jobs


def test_a_worker_that_cannot_start_says_nothing_of_an_op():
    """No op may be reported as failed if no worker can start, for example if another process has the GPU to itself."""
    results = list(Pool(["a", "b"], [sys.executable, "-c", "raise SystemExit('no torch')"], 1, seconds=20))
    assert [(r.op, r.verdict, r.why) for r in results] == [
        (op, UNKNOWN, "its start: exit status 1: no torch") for op in "ab"
    ]


def test_who_stops_iterating_leaves_no_worker_behind(tmp_path):
    log = tmp_path / "workers"
    for _ in Pool(["right", "hang", "hang too"], [sys.executable, str(WORKER), str(log)], 1, seconds=600):
        break
    assert all(gone(int(pid)) for pid in log.read_text().split())


def test_who_ends_the_process_group_ends_the_workers(tmp_path):
    log = tmp_path / "workers"
    code = f"""
from safeops.verify.pool import Pool
list(Pool(["hang"], [{sys.executable!r}, {str(WORKER)!r}, {str(log)!r}], 1, seconds=600))
"""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while not (log.exists() and log.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    process.wait()
    assert gone(int(log.read_text()))


def gone(pid):
    """Returns True if the process ends within five seconds. A zombie, for which no parent has waited, counts as
    ended."""
    status = Path(f"/proc/{pid}/status")
    for _ in range(50):
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.1)
    return False


def test_no_ops_no_workers(tmp_path):
    assert list(Pool([], ["nothing"], 8, seconds=1)) == []

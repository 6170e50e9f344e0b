"""debug.trace and debug.audit on several processes: one report, which names the rank."""

import subprocess
import sys

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import processes, watching  # noqa: E402

WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
pytestmark = pytest.mark.xdist_group("ranks")
found = processes.fixture(watching)


@pytest.mark.parametrize("case", watching.CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_on_several_processes(found, world, case):
    if wrong := processes.failure(found(world), case):
        pytest.fail(wrong)


SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    x = torch.ones(2, 3)
    if step == {step} and dist.get_rank() == 1:
        x[0, 0] = 0
    net(torch.log(x)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 9])
def test_a_script_under_torchrun_gets_one_report(tmp_path, monkeypatch, step):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(step=step))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    run = subprocess.run([*torchrun, "safeops", "trace", script], capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if line.startswith("safeops trace: ")]
    assert bool(run.returncode) == (step == 1) and len(lines) == 1, run.stdout + run.stderr[-2000:]
    if step == 1:
        assert "step 2, rank 1" in lines[0] and "torch.log(x)" in run.stdout
    else:
        assert "no NaN or inf reached a loss or a gradient in 3 steps" in lines[0]

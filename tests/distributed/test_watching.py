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
outcomes = processes.fixture(watching)


@pytest.mark.parametrize("case", watching.CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
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


@pytest.fixture
def under_torchrun(tmp_path, monkeypatch):
    """Returns a function (tool, script) that runs `safeops TOOL SCRIPT` under torchrun on two ranks."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "train.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "safeops"]

    def run(tool, script):
        path.write_text(script)
        return subprocess.run([*torchrun, tool, path], capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 9])
def test_a_script_under_torchrun_gets_one_report(under_torchrun, step):
    run = under_torchrun("trace", SCRIPT.format(step=step))
    lines = [line for line in run.stdout.splitlines() if line.startswith("safeops trace: ")]
    assert bool(run.returncode) == (step == 1) and len(lines) == 1, run.stdout + run.stderr[-2000:]
    if step == 1:
        assert "step 2, rank 1" in lines[0] and "torch.log(x)" in run.stdout
    else:
        assert "no NaN or inf reached a loss or a gradient in 3 steps" in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["dist.destroy_process_group()", "", "sys.exit(0)"])
def test_a_script_under_torchrun_is_audited_as_one(under_torchrun, end):
    """Each finding must appear once, with its ranks and both counts, whether or not the script destroys its group."""
    mean = "net(torch.log(x))[: 1 + dist.get_rank()].square().mean().backward()"
    script = SCRIPT.format(step=1).replace("net(torch.log(x)).square().mean().backward()", mean)
    script = "import sys\n" + script.replace("dist.destroy_process_group()", end)
    run = under_torchrun("audit", script)
    reports = run.stdout.count("safeops audit:")
    assert run.returncode == 1
    assert reports == 1 and run.stdout.count("domain: ") == 1, run.stdout + run.stderr[-2000:]
    assert "on rank 1\n" in run.stdout and "torch.log(x)" in run.stdout
    assert "a mean of 6 on rank 1, of 3 on rank 0" in run.stdout and "(3 times)" in run.stdout

"""The example of docs/distributed.md, started as a user does: by torchrun, on 1, 2 and 4 processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]
BEFORE = """
import torch
import torch.distributed as dist
import safeops

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1).double()
torch.set_default_dtype(torch.float64)
if dist.get_world_size() > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
torch.manual_seed(rank)  # the data differ
"""
AFTER = """
grads = torch.cat([p.grad.flatten() for p in model.parameters()])
batches = [None] * dist.get_world_size()
dist.all_gather_object(batches, micro_batches)
whole = getattr(model, "module", model)
every = [torch.cat(parts) for parts in zip(*[batch for of_rank in batches for batch in of_rank])]
whole.zero_grad()
safeops.mse_loss(whole(every[0]), every[1], mask=every[2]).backward()
safeops.clip_grad_norm_(whole, 1.0)
torch.testing.assert_close(grads, torch.cat([p.grad.flatten() for p in whole.parameters()]), rtol=1e-12, atol=1e-12)
print("right", flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def torchrun(monkeypatch):
    """Returns a function (ranks, *command) -> what the command prints under torchrun."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(ranks, *command):
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return subprocess.run([*start, *command], capture_output=True, text=True, timeout=300, check=True).stdout

    return run


def test_the_page_is_exact_on_any_number_of_ranks(torchrun, tmp_path):
    """The page's gradients equal those of one process with the micro-batches of all ranks."""
    section = (ROOT / "docs" / "distributed.md").read_text().split("## One count for all ranks")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    code, replaced = re.subn(r"^model = torch.nn.Linear\(8, 1\).*\n", "", code, flags=re.MULTILINE)  # BEFORE has it
    assert replaced == 1
    (tmp_path / "train.py").write_text(BEFORE + code + AFTER)
    for ranks in (1, 2, 4):
        assert torchrun(ranks, tmp_path / "train.py").count("right") == ranks


def test_the_example_prints_one_curve(torchrun):
    example = ROOT / "examples" / "train_distributed.py"
    one, two, four = (torchrun(ranks, example, "5") for ranks in (1, 2, 4))
    assert one == two == four and re.fullmatch(r"loss \d\.\d{3} -> \d\.\d{3}\n", one)

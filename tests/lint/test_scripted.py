"""--fix leaves alone what torch.jit.script compiles: in the same file, and in others of the run."""

import runpy

import pytest

from safeops import cli
from safeops.lint.check import fix_source

LOSS = "import torch\nfrom torch import nn\n\n\ndef loss(x):\n    return torch.log(x).mean()\n\n\n"
MODULE = """\
import torch
from torch import nn


class BaseLoss(nn.Module):
    def forward(self, x):
        return torch.log(x).mean()


class SumLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([BaseLoss()])

    def forward(self, x):
        return self.parts[0](x)


class OwnLoss(BaseLoss):
    pass


"""


@pytest.mark.parametrize("source", [
    LOSS + "fast = torch.jit.script(loss)\n",
    LOSS + "def total_loss(x):\n    return loss(x) * 2\n\n\nfast = torch.jit.script(total_loss)\n",
    LOSS + "@torch.jit.script\ndef total_loss(x):\n    return loss(x) * 2\n",
    LOSS + "from torch.jit import script\nf = loss\nfast = script(f)\n",
    MODULE + "fast = torch.jit.script(BaseLoss())\n",
    MODULE + "m = BaseLoss()\nm = m.eval()\nfast = torch.jit.script(m)\n",
    MODULE + "fast = torch.jit.script(SumLoss().eval())\n",
    MODULE + "m = nn.Sequential(OwnLoss())\nfast = torch.jit.script(m)\n",
    MODULE + "def build():\n    return OwnLoss()\n\n\nfast = torch.jit.script(build())\n",
])  # fmt: skip
def test_in_the_same_file(source, tmp_path):
    assert fix_source(source) == (source, 0)
    (tmp_path / "scripted_here.py").write_text(source)
    runpy.run_path(str(tmp_path / "scripted_here.py"))
    assert (
        fix_source(source.replace("jit.script", "jit.trace").replace("jit import script", "jit import trace"))[1] == 1
    )


LOSSES = MODULE + LOSS.partition("nn\n\n\n")[2]
NET = """\
import losses
from torch import jit, nn


class Net(nn.Module):
    def forward(self, x):
        return losses.loss(x)
"""
OTHERS = [
    ("loss", {"use.py": "import losses as L\nimport torch\n\nfast = torch.jit.script(L.loss)\n"}),
    ("forward", {"use.py": "import torch\nfrom losses import OwnLoss\n\nm = OwnLoss()\nf = torch.jit.script(m)\n"}),
    ("loss", {"use.py": NET + "\n\nfast = jit.script(Net())\n"}),
]


@pytest.mark.parametrize("mode", ["--fix", "--diff"])
@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("kept, others", OTHERS)
def test_in_another_file(kept, others, jobs, mode, tmp_path, capsys):
    files = {**others, "losses.py": LOSSES, **{f"empty{i}.py": "" for i in range(20)}}  # enough for two processes
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    cli.main(["lint", str(tmp_path), mode, "--jobs", jobs])
    written = capsys.readouterr().out if mode == "--diff" else (tmp_path / "losses.py").read_text()
    (line,) = [line.lstrip("+") for line in written.splitlines() if "safeops.safe_log" in line]
    assert line == {"loss": 8, "forward": 4}[kept] * " " + "return safeops.safe_log(x).mean()", "the other one"

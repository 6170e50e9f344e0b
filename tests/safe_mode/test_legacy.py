"""Unedited training scripts that break in fp16 train in safe mode; in fp32 the mode changes nothing."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import safeops

LEGACY = Path(__file__).resolve().parents[2] / "examples" / "legacy"


def losses(name, steps, capsys):
    """Runs a script. Returns the first and the last loss, as the script prints them."""
    spec = importlib.util.spec_from_file_location(name, LEGACY / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(steps)
    first, last = capsys.readouterr().out.removeprefix("loss ").split(" -> ")
    return float(first), float(last)


@pytest.mark.parametrize("name", sorted(path.stem for path in LEGACY.glob("*.py")))
def test_a_script_breaks_and_trains(name, capsys):
    first, last = losses(name, 3, capsys)
    assert math.isnan(last) or first == last, "it does not break: what is it an example of?"
    with safeops.safe_mode() as report:
        first, last = losses(name, 10, capsys)
    assert last < 0.8 * first, (first, last)
    assert {Path(x.file).name for x in report.replacements} == {f"{name}.py"}
    assert "safeops" not in (LEGACY / f"{name}.py").read_text().replace("safeops run", "")


def trained(steps=12):
    """Returns the losses and weights of a training in fp32 that calls most of the functions that safe mode replaces."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, labels, target, mask = torch.randn(32, 6), torch.randint(0, 5, (32,)), torch.rand(32, 5), torch.rand(32, 5) > 0.4
    result = []
    for _ in range(steps):
        y = model(x)
        m = mask.float()
        e = (y - target).square()
        attention = y.masked_fill(~mask, -1e9).softmax(-1)
        loss = F.cross_entropy(y, labels, label_smoothing=0.1) + (e * m).sum() / m.sum() + e[mask].mean()
        loss = loss + F.smooth_l1_loss(attention, target) + (1 - F.cosine_similarity(y, target)).mean()
        loss = loss + torch.where(mask, y / (target + 0.1), 0.0).mean() * 0.1 + F.normalize(y).norm() * 0.1
        loss = loss + F.kl_div(y.log_softmax(-1), target.softmax(-1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        result.append(loss.detach())
    return [*result, *model.parameters()]


def test_a_training_in_fp32_is_torchs():
    expected = trained()
    with safeops.safe_mode() as report:
        result = trained()
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    twins = {x.twin for x in report.replacements}
    rows = {"normalize", "cosine_similarity"}
    assert twins >= {*rows, "cross_entropy", "smooth_l1_loss", "kl_div", "apply_where"}
    assert "clip_grad_norm_" in twins and not twins & {"safe_norm", "masked_sum", "masked_softmax"}, (
        "which would mend nothing here"
    )

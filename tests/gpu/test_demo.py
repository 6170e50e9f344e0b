"""`safeops demo --device cuda` ends every run with the verdict that the run has on a CPU."""

import pytest
import torch

from tests import test_demo  # skips this file where the demo's packages are missing
from tests.test_demo import losses, pair, part, run, screen, training  # noqa: F401

pytestmark = pytest.mark.gpu


def test_the_demo(tmp_path, capsys):
    code = run.main(device="cuda", out=str(tmp_path / "demo.png"))
    printed = capsys.readouterr().out
    assert code == 0, printed
    # The limit is 15 s on a GPU. The test allows twice that, since other tests may share the GPU.
    assert "on cuda" in printed and int(printed.split("Time: ")[1].split()[0]) <= 30, printed


@pytest.mark.parametrize("changed", [test_demo.Ulps, test_demo.MoreZeros, test_demo.NoZeros])
def test_no_verdict_depends_on_what_the_network_rounds_to(part, monkeypatch, changed):  # noqa: F811
    monkeypatch.setattr(training, "StereoNet", changed)
    monkeypatch.setattr(training, "PATIENCE", 1)
    part = type(part)(**{name: image.cuda() for name, image in vars(part).items()})
    for f, expected in losses.VERDICTS.items():
        assert screen.verdict(training.train(f, part, steps=test_demo.STEPS)) == expected, f


def test_half_counts_to_65504_outside_autocast():
    mask = torch.ones(70_000, dtype=torch.float16, device="cuda")
    with torch.autocast("cuda", torch.float16):
        assert mask.sum() == 70_000
        with torch.autocast("cuda", enabled=False):
            assert mask.sum().isinf()

"""examples/train_distributed.py has equal losses on any number of processes, which means per rank do not have."""

import importlib
from pathlib import Path

import pytest
import torch

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

STEPS = 20


@pytest.fixture(scope="module")
def example():
    with pytest.MonkeyPatch.context() as patch:  # sys.path with the example, which the processes inherit
        patch.syspath_prepend(Path(__file__).resolve().parents[2] / "examples")
        yield importlib.import_module("train_distributed")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_the_curve_is_that_of_one_process(example, ranks):
    curves = [torch.tensor(curve) for curve in (example.train(STEPS), example.on(ranks, STEPS, exact=True))]
    torch.testing.assert_close(*curves, rtol=0, atol=1e-5)
    by_rank = torch.tensor(example.on(ranks, STEPS, exact=False))
    assert (by_rank - curves[0]).abs().max() > 0.01

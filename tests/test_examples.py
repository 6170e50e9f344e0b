"""Each example learns in a few steps on its own data."""

import importlib.util
import math
from pathlib import Path

import pytest

pytest.importorskip("skimage")
FILES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", [*FILES[:1], *(pytest.param(path, marks=pytest.mark.slow) for path in FILES[1:])],
                         ids=lambda path: path.stem)  # fmt: skip
def test_example(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses = module.train(steps=12)
    assert all(map(math.isfinite, losses)) and losses[-1] < 0.8 * losses[0], losses

"""Run by test_triton_interpreter.py in a process that has TRITON_INTERPRET=1; collected nowhere else."""

import os

import pytest
import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]


@pytest.fixture(autouse=True)
def unwritten_is_nan():
    """torch.empty gives NaN: an element that a kernel forgets shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles so small that a few hundred elements make many blocks, several splits and a last block that gathers."""
    from safeops.kernels import elementwise, launch, reduce, reduction

    launch._plans.clear()
    small = launch.Config(threads=16, tile_bytes=512)
    monkeypatch.setitem(reduction.REDUCE.configs, None, small)
    monkeypatch.setitem(elementwise.MAP.configs, None, small)
    monkeypatch.setattr(elementwise, "WIDEST", 32)
    monkeypatch.setattr(
        reduce, "POLICY", reduce.Policy(blocks=8, most_splits=4, widest=32, widest_kept=16, partials=32)
    )

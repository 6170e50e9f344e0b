"""Fixtures, compiled once for all files: the elementwise CUDA sources for the emulation, Triton's plans."""

import os

import pytest
import torch

from tests.kernels.emulated import BINARY, HOST, SOURCES, UNARY, compiled, counter


@pytest.fixture
def triton_cache(monkeypatch, tmp_path_factory):
    """A cache of this run alone, for all its workers."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """(ops, counts): the raw ops, and what counter() gives."""
    target = compiled([*SOURCES, *HOST], tmp_path_factory.mktemp("emulated") / "cuda_emulated.so")
    library = torch.library.Library("safeops_emulated", "FRAGMENT")
    library.define("_masked_fill(Tensor input, Tensor fill_mask, Tensor? value=None, float number=0.0) -> Tensor")
    for name in UNARY:
        library.define(
            f"_{name}(Tensor input, float? eps=None, float fill_value=0.0, ScalarType? dtype=None) -> Tensor"
        )
        library.define(f"_{name}_backward(Tensor grad, Tensor input, float? eps=None) -> Tensor")
    for name in (f"_{op}{kind}" for op in BINARY for kind in ("", "_backward")):
        library.define(str(getattr(torch.ops.safeops, name).default._schema).removeprefix("safeops::"))
    torch.ops.load_library(str(target))
    counts = counter(target)
    yield torch.ops.safeops_emulated, counts
    library._destroy()

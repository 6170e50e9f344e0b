"""Fixtures, compiled once for all files: the elementwise CUDA sources for the executor, Triton's plans."""

import os

import pytest

from tests.kernels.cuda_sources import HOST, SOURCES
from tests.kernels.executed import cuda


@pytest.fixture
def triton_cache(monkeypatch, tmp_path_factory):
    """Path of a Triton cache that all workers of this test run share, and no other run."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))


@pytest.fixture(scope="session")
def ops():
    """The raw elementwise CUDA ops, which run on CPU tensors by the executor."""
    return cuda.ops(*SOURCES, *HOST)

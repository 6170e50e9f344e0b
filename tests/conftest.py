"""Shared by all tests: the same random numbers in every run, and threads that leave the cores to other workers."""

import multiprocessing
import os
import tempfile

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers fill the cores: a waiting OpenMP thread must not spin, also in processes that tests start.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # A cache per capability: code that Inductor cached for another vector length does not compile.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{capability}")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # tests of threads set their own number


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pytest_sessionfinish():
    """Python waits at its end for the processes that a test has started and that hang."""
    for process in multiprocessing.active_children():
        process.kill()


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

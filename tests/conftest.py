"""Shared by all tests: the same numbers every run, and no fight over the cores."""

import os
import tempfile

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers fill the cores: threads of the processes that tests start must not spin while they wait for one.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    # Inductor's cache would give this one the code of another vector length, which then does not compile.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{capability}")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # a test about threads sets its own number


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))

"""Skips tests/gpu unless there is a CUDA device and SAFEOPS_TEST_DEVICE=cuda, which scripts/gpu_check.py sets."""

import os
from pathlib import Path

import pytest
import torch

ON_CPU = {"test_gpu_check_script.py", "test_unseen.py"}


def pytest_collection_modifyitems(items):
    if os.environ.get("SAFEOPS_TEST_DEVICE") != "cuda":
        reason = "needs a GPU: SAFEOPS_TEST_DEVICE is not cuda"
    elif not torch.cuda.is_available():
        reason = "needs a GPU: torch sees no CUDA device"
    else:
        return
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent and Path(item.fspath).name not in ON_CPU:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def free_memory():
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

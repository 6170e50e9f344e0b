"""Runs tests/kernels/interpreted, where Triton's interpreter executes every Triton kernel on CPU tensors.

Triton reads TRITON_INTERPRET at its first import. This process may have imported Triton already, or may need its
compiler, so these tests run in a process of their own. By hand: TRITON_INTERPRET=1 pytest tests/kernels/interpreted
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def unusable():
    """Returns the reason why the interpreter cannot run on this machine, or None if it can."""
    import numpy
    import triton

    try:
        int(numpy.ones(1))
    except TypeError:
        if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
            return f"the interpreter of triton {triton.__version__} needs an older numpy than {numpy.__version__}"


FILES = {path.name: path.read_text() for path in sorted(FOLDER.glob("test_*.py"))}
BATCHES = 8


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(BATCHES))  # a process takes two seconds to start
def test_in_the_interpreter(batch):
    run([*FILES][batch::BATCHES], "-m", "not exhaustive")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("file", [name for name, text in FILES.items() if "exhaustive" in text])
def test_the_rest_in_the_interpreter(file):
    run([file], "-m", "exhaustive")


@pytest.mark.slow
def test_a_sample_in_the_interpreter():
    run(["test_contract_of_losses.py"], "-k", "poisson_nll_loss or beta")


def run(files, *options):
    if reason := unusable():
        pytest.skip(reason)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    command += [FOLDER / file for file in files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]

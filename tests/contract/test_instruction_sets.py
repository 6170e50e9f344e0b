"""The contract's numbers hold under every instruction set that the CPU kernels and torch's can choose.

A process chooses once, so each set runs in a process of its own. A set that the machine lacks is capped to one it has.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from safeops.core.op import registry
from tests.contract.common import DEVICE

KERNELS = DEVICE == "cpu" and all(entry.cpu for entry in registry.values())


@pytest.mark.skipif(not KERNELS or platform.machine() not in ("x86_64", "AMD64"), reason="one instruction set here")
@pytest.mark.slow
@pytest.mark.parametrize("isa", ["default", "avx2"])
def test_numbers_hold(isa):
    if isa.upper() == torch.backends.cpu.get_cpu_capability():
        pytest.skip("this machine's best: every other test runs it")
    folder = Path(__file__).parent
    files = sorted(
        str(path) for name in ("properties", "stand_ins_*", "edges") for path in folder.rglob(f"test_{name}.py")
    )
    # Tests with data for several threads.
    files += [
        "test_contract.py",
        "vectors/test_rows.py",
        "classification/test_classification.py",
        "lists/test_lists.py",
    ]
    files += ["test_invariance.py::test_a_reduced_row_does_not_see_its_neighbours"]
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short"]
    options += ["-k", "(stand_ins or not composite) and (not test_contract or -threads]) and not -many]"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "SAFEOPS_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": isa, "SAFEOPS_TEST_EXAMPLES": "25"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"under {isa}:\n{result.stdout[-4000:]}\n{result.stderr[-2000:]}"


@pytest.mark.skipif(not KERNELS, reason="no CPU kernels here")
def test_unknown_name_is_refused():
    message = "SAFEOPS_CPU_ISA: expected avx512, avx2 or default, got 'avx3'"
    result = under("avx3", "-c", "import torch, safeops; safeops.masked_sum(torch.ones(3))")
    assert result.returncode and message in result.stderr
    result = under("avx3", "-m", "safeops", "doctor")
    assert result.returncode == 0 and message in result.stdout and "masked_sum" in result.stdout
    assert under("", "-c", "import torch, safeops; safeops.masked_sum(torch.ones(3))").returncode == 0  # as if unset


def under(isa, *command):
    environment = {**os.environ, "SAFEOPS_CPU_ISA": isa}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)

"""global_count, alone and as denominator of a training on several processes."""

import subprocess
import sys

import pytest
import torch

import safeops
from safeops.distributed import global_count

dist = pytest.importorskip("torch.distributed")
if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed import counts, processes  # noqa: E402

WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]
outcomes = processes.fixture(counts)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("case", counts.CASES)
@pytest.mark.parametrize("world", WORLDS)
def test_on_several_processes(outcomes, world, case):
    if wrong := processes.failure(outcomes(world), case):
        pytest.fail(wrong)


def test_of_one_process():
    keep = torch.tensor([True, False, True])
    for averaged in (True, False):
        assert global_count([keep, keep], averaged=averaged).tolist() == 4
        assert global_count(keep, weight=torch.tensor([0.5, 9.0, 2.0]), averaged=averaged).tolist() == 2.5
    count = global_count(keep)
    assert type(count) is torch.Tensor and count.dtype == torch.float64 and not count.requires_grad
    assert safeops.distributed.global_count is global_count


def test_masked_out_weights_do_not_exist():
    keep, weight = torch.tensor([True, False]), torch.tensor([2.0, torch.nan], requires_grad=True)
    count = global_count(keep, weight=weight)
    assert count.tolist() == 2 and not count.requires_grad


def test_a_group_needs_processes():
    with pytest.raises(ValueError, match="global_count: group"):
        global_count(torch.ones(2, dtype=torch.bool), group=object())


def test_import_does_not_load_dtensors():
    code = "import sys, safeops; print(any(m.startswith('torch.distributed.tensor') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"

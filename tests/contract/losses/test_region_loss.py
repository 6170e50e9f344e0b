"""The CPU kernel that computes a region loss from its sums: value and both gradients equal the definition's."""

import pytest
import torch

from tests.ops.losses import of_sums

raw = torch.ops.safeops
KERNELS = (raw._region_loss, raw._region_loss_backward)
BAD = {
    "sums": (torch.zeros(3, 2, 2, dtype=torch.float64), None, torch.ones(()), "sums must be float64 of shape"),
    "narrow sums": (torch.zeros(4, 2, 2), None, torch.ones(()), "sums must be float64 of shape"),
    "weight": (torch.zeros(4, 2, 2, dtype=torch.float64), torch.ones(3), torch.ones(()), "one number for each class"),
    "grad": (torch.zeros(4, 2, 2, dtype=torch.float64), None, torch.ones(2), "grad must be floating"),
}


@pytest.mark.parametrize("case", [*of_sums.options()], ids=str)
def test_against_the_definition(case):
    of_sums.against_the_definition(KERNELS, *case)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("name", of_sums.NUMBERS)
def test_nothing_kept(name, reduction):
    of_sums.nothing_kept(KERNELS, name, reduction)


def test_an_upstream_gradient_of_stride_0():
    of_sums.stride_0(KERNELS)


@pytest.mark.parametrize("which", BAD)
def test_operands_of_other_shapes(which):
    sums, weight, grad, message = BAD[which]
    with pytest.raises(RuntimeError, match=message):
        raw._region_loss_backward(grad, sums, weight, None, None, 1, False, False, 0.0, 0.0, None, None, True, True)

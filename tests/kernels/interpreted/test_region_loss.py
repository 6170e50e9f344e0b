"""The kernel that computes a region loss from its sums agrees with the definition, in values and both gradients."""

import pytest
import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it beside every jit function)
from safeops.kernels.losses.region_loss import region_loss, region_loss_backward

from tests.ops.losses import of_sums

KERNELS = region_loss, region_loss_backward


@pytest.mark.parametrize("case", [*of_sums.options()], ids=str)
def test_against_the_definition(case):
    of_sums.against_the_definition(KERNELS, *case)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("name", of_sums.NUMBERS)
def test_nothing_kept(name, reduction):
    of_sums.nothing_kept(KERNELS, name, reduction)


def test_an_upstream_gradient_of_stride_0():
    of_sums.stride_0(KERNELS)
    assert triton.knobs.runtime.interpret

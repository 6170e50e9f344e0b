"""The contract's tests of losses (tests/contract) hold for the interpreted Triton kernels."""

import pytest
import torch
from safeops.kernels.vectors.triplet_margin_loss import triplet_margin_loss

from safeops.ops.losses._pointwise import PointwiseLoss
from tests.contract.common import names
from tests.contract.losses import test_edges as edges
from tests.contract.losses import test_losses as losses
from tests.contract.losses import test_regions as regions

pytestmark = pytest.mark.usefixtures("triton_route")


@pytest.fixture(autouse=True)
def small_tiles():
    """Overrides the fixture: tiles as large as on a GPU run faster in the interpreter."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", names(PointwiseLoss))
def test_a_grid_of_edges(name, dtype):
    edges.test_a_grid_of_edges(name, dtype, "kernel")


@pytest.mark.parametrize("special", [None, 3e38])
def test_regions_in_bf16_to_their_last_digit(special):
    regions.test_bf16_to_its_last_digit("kernel", (33,), special)


@pytest.mark.parametrize("name", regions.NAMES)
def test_a_region_without_a_pixel_counts_for_nothing(name):
    regions.test_a_region_without_a_pixel_counts_for_nothing("kernel", name)


def test_a_subnormal_beta_counts_as_zero():
    losses.test_a_subnormal_beta_counts_as_zero()


def test_distances_of_long_rows_keep_their_digits():
    """A distance over 9,000 elements is right to 2^-26: a triplet's loss is a difference of two nearly equal
    distances."""
    a, p, n = (torch.randn(2, 9000, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    _, near, far, _ = triplet_margin_loss(a, p, n, None, 1.0, 2.0, 0.0, False)
    for got, other in ((near, p), (far, n)):
        want = (a.double() - other.double()).norm(dim=1)
        assert ((got / want - 1).abs() < 2**-26).all()

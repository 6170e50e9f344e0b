"""Tests of the contract, of losses, whose kernels are here Triton's."""

import pytest
import torch

from tests.contract.common import names
from tests.contract.losses import test_edges as edges
from tests.contract.losses import test_losses as losses
from tests.contract.losses import test_regions as regions
from tests.contract.rows import test_row_losses as rows

pytestmark = pytest.mark.usefixtures("triton_route")


@pytest.fixture(autouse=True)
def small_tiles():
    """Here they are as large as on a GPU, which the interpreter runs faster."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", names("losses"))
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


@pytest.mark.parametrize("swap", [False, True])
def test_triplet_margin_loss_of_long_rows(swap):
    rows.test_triplet_margin_loss_of_sizes("kernel", (2, 9000), swap)

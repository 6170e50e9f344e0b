"""lpips_distance of the features of a real network, masked, and in half."""

import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from tests.contract.common import DEVICE, each_route, on
from tests.contract.images.pixels import images, value_and_gradients

NAN = math.nan


@each_route
def test_lpips_64_channels_of_40_in_half_and_zero_features(route):
    x = torch.full((1, 64, 2, 2), 40.0, dtype=torch.float16, device=DEVICE)
    y = x.clone()
    y[:, 32:] = 0
    assert x.norm(dim=1).isfinite().all() and (x.square().sum(1)).isinf().all()
    distance = on(route, "lpips_distance")
    assert distance([x], [y]).item() == pytest.approx(2 - math.sqrt(2), rel=1e-3)
    zero = torch.zeros_like(x)
    value, (dz, dx) = value_and_gradients(lambda a, b: distance([a], [b]), zero, x)
    assert value == 1 and (dz == 0).all() and dx.isfinite().all()


class Network(torch.nn.Module):
    """A small convolutional network that returns the features of each layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 16, 3, 2, 1), torch.nn.Conv2d(16, 32, 3, 2, 1)]
        )

    def forward(self, x):
        features = []
        for layer in self.layers:
            x = layer(x).relu()
            features.append(x)
        return features


@each_route
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lpips_of_the_features_of_a_network(route, dtype):
    network, (x, y) = Network().to(DEVICE, dtype), images(2, 3, 24, 20, dtype=dtype)
    weights = [torch.rand(1, c, 1, 1, device=DEVICE) for c in (8, 16, 32)]
    x.requires_grad_()
    f0, f1 = network(x), network(y)
    got = on(route, "lpips_distance")(f0, f1, weights, reduction="none")
    want = 0
    for a, b, w in zip(f0, f1, weights):
        a, b = (F.normalize(f.double(), dim=1, eps=1e-30) for f in (a, b))
        want = want + ((a - b).square() * w).sum(1).mean((1, 2))
    torch.testing.assert_close(got.double(), want)
    (dx,) = torch.autograd.grad(got.sum(), x)
    assert got.dtype == torch.float32 and dx.isfinite().all() and dx.abs().sum() > 0
    assert on(route, "lpips_distance")(f1, f1, weights) == 0


@each_route
def test_lpips_mask_of_the_images_reaches_every_layer(route):
    network, (x, y) = Network().to(DEVICE), images(1, 3, 24, 20)
    keep = torch.ones(1, 1, 24, 20, dtype=torch.bool, device=DEVICE)
    keep[..., :9, :] = False
    f0, f1 = network(x), network(y)
    for f, rows in zip(f0, (9, 5, 3)):  # a layer's position is dropped if any of its pixels is masked
        f[..., :rows, :] = NAN
    distance = on(route, "lpips_distance")
    assert distance(f0, f1).isnan() and distance(f0, f1, mask=keep).isfinite()
    f0[2][..., 3, 0] = NAN
    assert distance(f0, f1, mask=keep).isnan()
    parts = [[f[..., rows:, :] for f, rows in zip(layers, (9, 5, 3))] for layers in (network(x), f1)]
    f0 = network(x)
    torch.testing.assert_close(distance(f0, f1, mask=keep), distance(*parts))


def test_lpips_called_directly_as_an_op():
    f0, f1 = [torch.rand(2, 3, 4, 4), torch.rand(2, 5, 2, 2)], [torch.rand(2, 3, 4, 4), torch.rand(2, 5, 2, 2)]
    weights = [torch.rand(3), torch.rand(5)]
    want = safeops.lpips_distance(f0, f1, weights)
    assert torch.equal(torch.ops.safeops.lpips_distance(f0, f1, weights), want)

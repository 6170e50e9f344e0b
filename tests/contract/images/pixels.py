"""Helpers of the tests of images: they make pairs of images and masks, and compute values and gradients."""

import torch

from tests.contract.common import DEVICE
from tests.ops import definitions


def images(*shape, dtype=torch.float32, seed=0, noise=0.1):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(shape, generator=g, dtype=torch.float64)
    y = (x + noise * torch.randn(shape, generator=g, dtype=torch.float64)).clamp(0, 1)
    return x.to(DEVICE, dtype), y.to(DEVICE, dtype)


def kept(*shape, seed=0, share=0.7):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share).to(DEVICE)


def value_and_gradients(function, *leaves, **options):
    leaves = [x.detach().requires_grad_() for x in leaves]
    value = function(*leaves, **options)
    return value.detach(), torch.autograd.grad(value.sum(), leaves)


def truth(name, *operands, **options):
    return getattr(definitions, name)(*(x.double() for x in operands), **options)

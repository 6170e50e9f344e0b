"""Parameters with gradients of many kinds, for the tests of grad_norm and clip_grad_norm_."""

import math

import pytest
import torch

from tests.contract.lists.tensor_lists import FLOATS, layouts, many, values

each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def parameters(gradients):
    """Returns parameters with exactly these tensors as gradients, whatever their strides."""
    result = []
    for g in gradients:
        p = torch.nn.Parameter(torch.zeros(g.shape, dtype=g.dtype))
        p.grad = g
        result.append(p)
    return result


def clones(tensors):
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x) for x in tensors]


def true_norm(gradients, ord=2.0):
    sizes = torch.cat([g.double().reshape(-1) for g in gradients]).abs()
    total = sizes.max() if ord == math.inf else math.fsum((sizes**ord).tolist()) ** (1 / ord)
    return torch.tensor(float(total), dtype=torch.float64)


def sets(dtype):
    """Returns lists of gradients with norms that torch can compute in their dtype."""
    divisor = 64 if dtype == torch.float16 else 1
    for gradients in (layouts(dtype, odd=0), many(dtype, odd=0), [values(100_000, dtype=dtype, odd=0)]):
        yield [g / divisor for g in gradients if g.numel()]


def mixed():
    """Returns gradients of every dtype and layout."""
    return [g for dtype in FLOATS for g in layouts(dtype, odd=0)]

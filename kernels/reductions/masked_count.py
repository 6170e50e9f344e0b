"""masked_count: how many elements are kept. Reads the mask and the weight, never the input."""

import torch

from ..engine.reduce import reduced_dims, reduced_shape
from .fold import fold
from .statistic import COUNT


def masked_count(input, mask=None, weight=None, dim=None, keepdim=False):
    if mask is None and weight is None:
        reduced = reduced_dims(input.shape, dim)
        count = 1
        for size, gone in zip(input.shape, reduced):
            count *= size if gone else 1
        return torch.full(reduced_shape(input.shape, reduced, keepdim), count, dtype=torch.int64, device=input.device)
    return fold("masked_count", COUNT, input, mask, weight, dim, keepdim)

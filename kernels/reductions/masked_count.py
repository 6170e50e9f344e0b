"""masked_count: how many elements are kept. Reads the mask and the weight; the input only where it is the mask."""

from math import prod

import torch

from ..engine.state import COUNT
from ..engine.tiling import reduced_dims, reduced_shape
from .statistic import statistic


def masked_count(input, mask=None, weight=None, dim=None, keepdim=False):
    if mask is None and input.dtype == torch.bool:
        mask = input
    if mask is None and weight is None:
        reduced = reduced_dims(input.shape, dim)
        count = prod(size for size, gone in zip(input.shape, reduced) if gone)
        return torch.full(reduced_shape(input.shape, reduced, keepdim), count, dtype=torch.int64, device=input.device)
    return statistic("masked_count", COUNT, None, input, mask, weight, dim, keepdim)

"""cosine_similarity: x1 . x2 / (max(|x1|, eps) max(|x2|, eps)) for each row; 0 where one is all zeros."""

import torch

from ..engine.launch import common_shape, like
from .cosine import COSINE, COSINE_BACKWARD
from .row import FOLD, MAP, computed_in, floor, launch, thin


def cosine_similarity(x1, x2, dim=-1, eps=None):
    shape, compute, device = common_shape(x1, x2), computed_in(x1, x2), x1.device
    dim = dim % max(len(shape), 1)
    rows = thin(shape, dim)
    value = torch.empty(rows, dtype=compute, device=device)
    norm1, norm2 = (torch.empty(rows, dtype=torch.float64, device=device) for _ in range(2))
    if value.numel():
        launch(
            "cosine_similarity", COSINE, (x1, x2, value, norm1, norm2), (2, 3, 4), shape, dim, compute,
            floor(eps, compute), phases=FOLD, partials=5,
        )  # fmt: skip
    return value.squeeze(dim) if shape else value, norm1, norm2


def cosine_similarity_backward(
    grad, x1, x2, value, norm1, norm2, dim=-1, eps=None, need_x1=True, need_x2=True
):  # fmt: skip
    """Gradients of the full shape: the caller sums them to the operands', and so those of a broadcast one stay wide."""
    shape, compute = common_shape(x1, x2), computed_in(x1, x2, grad)
    dim = dim % max(len(shape), 1)
    if shape:
        grad, value = grad.unsqueeze(dim), value.unsqueeze(dim)
    dtypes = [x.dtype if x.shape == shape else compute for x in (x1, x2)]
    dx1, dx2 = (
        like(x, shape, dtype) if needed else None for x, dtype, needed in zip((x1, x2), dtypes, (need_x1, need_x2))
    )
    if shape.numel() and (need_x1 or need_x2):
        launch(
            "cosine_similarity_backward", COSINE_BACKWARD, (x1, x2, grad, value, norm1, norm2, dx1, dx2),
            (2, 3, 4, 5), shape, dim, compute, floor(eps, computed_in(x1, x2)), phases=MAP,
        )  # fmt: skip
    return tuple(x1.new_empty(0, dtype=dtype) if dx is None else dx for dx, dtype in zip((dx1, dx2), dtypes))

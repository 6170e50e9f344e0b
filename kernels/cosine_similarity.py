"""cosine_similarity: x1 . x2 / (max(|x1|, eps) max(|x2|, eps)) for each row; 0 where one is all zeros."""

import torch

from .pointwise_loss import common_shape, like
from .row import computed_in, floor, launch, thin
from .rows import COSINE, COSINE_GRADIENT


def cosine_similarity(x1, x2, dim=-1, eps=None):
    shape, compute, device = common_shape(x1, x2), computed_in(x1, x2), x1.device
    dim = dim % max(len(shape), 1)
    rows = thin(shape, dim)
    value = torch.empty(rows, dtype=compute, device=device)
    norm1, norm2 = (torch.empty(rows, dtype=torch.float64, device=device) for _ in range(2))
    if value.numel():
        launch(
            "cosine_similarity", COSINE, (x1, x2, value, norm1, norm2), (2, 3, 4), shape, dim, compute,
            floor(eps, compute),
        )  # fmt: skip
    return value.squeeze(dim) if shape else value, norm1, norm2


def cosine_similarity_backward(
    grad, x1, x2, value, norm1, norm2, dim=-1, eps=None, need_x1=True, need_x2=True
):  # fmt: skip
    """Gradients of the full shape: the caller sums them to the operands'."""
    shape, compute = common_shape(x1, x2), computed_in(x1, x2)
    dim = dim % max(len(shape), 1)
    if shape:
        grad, value = grad.unsqueeze(dim), value.unsqueeze(dim)
    dx1 = like(x1, shape, x1.dtype) if need_x1 else None
    dx2 = like(x2, shape, x2.dtype) if need_x2 else None
    if shape.numel() and (need_x1 or need_x2):
        launch(
            "cosine_similarity_backward", COSINE_GRADIENT, (x1, x2, grad, value, norm1, norm2, dx1, dx2),
            (2, 3, 4, 5), shape, dim, compute, floor(eps, compute), summed=False,
        )  # fmt: skip
    return (
        x1.new_empty(0) if dx1 is None else dx1,
        x2.new_empty(0) if dx2 is None else dx2,
    )

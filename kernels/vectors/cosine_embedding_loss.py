"""cosine_embedding_loss of each row, and its gradient: the kernels are those of cosine_similarity, with
a target."""

import torch

from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.row_plan import MAP, SUM, floor, launch
from .cosine_similarity import BACKWARD_PER_ROW, COSINE, COSINE_BACKWARD, PER_ROW


def each_row(*row_stats):
    return tuple(None if x is None else x.unsqueeze(-1) for x in row_stats)


def prepare(input1, input2, target, keep):
    """Returns (results, arguments of row_plan.launch, its options)."""
    compute = compute_dtype(input1, input2)
    dtypes = compute, compute, torch.float64, torch.float64
    results = tuple(empty(target.shape, dtype, input1.device) for dtype in dtypes)
    tensors = input1, input2, *each_row(target, keep, *results)
    plan = COSINE, tensors, PER_ROW, input1.shape, input1.dim() - 1, compute
    return results, plan, {"phases": SUM, "partials": 5}


def prepare_backward(grad, vectors, target, row_stats, needed):
    slopes = tuple(torch.empty_like(x) if wanted else None for x, wanted in zip(vectors, needed))
    tensors = *vectors, *each_row(target, grad, *row_stats), *slopes
    shape = vectors[0].shape
    plan = COSINE_BACKWARD, tensors, BACKWARD_PER_ROW, shape, len(shape) - 1, compute_dtype(*vectors, grad)
    return slopes, plan, {"phases": MAP}


def cosine_embedding_loss(input1, input2, target, keep=None, margin=0.0):
    results, plan, options = prepare(input1, input2, target, keep)
    if target.numel():
        launch("cosine_embedding_loss", *plan, (floor(None, plan[-1]), margin), **options)
    return results


def cosine_embedding_loss_backward(grad, input1, input2, target, value, norm1, norm2, margin=0.0, *needed):
    vectors = input1, input2
    slopes, plan, options = prepare_backward(grad, vectors, target, (value, norm1, norm2), needed)
    if input1.numel() and any(needed):
        eps = floor(None, compute_dtype(*vectors))
        launch("cosine_embedding_loss_backward", *plan, (eps, margin), **options)
    return tuple(x.new_empty(0) if dx is None else dx for x, dx in zip(vectors, slopes))

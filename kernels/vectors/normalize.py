"""normalize: y = x / max(|x|, eps) for each row; a row of zeros stays."""

import torch

from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.row_backward import ROWS_BACKWARD
from ..engine.row_forward import NORMALIZE, ROWS
from ..engine.row_plan import floor, launch, with_one_per_row


def normalize(input, dim=-1, eps=None):
    dim = dim % max(input.dim(), 1)
    out = torch.empty_like(input)
    shape, compute = input.shape, compute_dtype(input)
    norm = empty(with_one_per_row(shape, dim), torch.float64, input.device)
    if norm.numel():
        launch(
            "normalize", ROWS, (input, None, out, norm, None), (3, 4), shape, dim, compute, (floor(eps, compute),),
            {"OP": NORMALIZE.value}, partials=3,
        )  # fmt: skip
    return out, norm


def normalize_backward(grad, input, norm, dim=-1, eps=None):
    out = torch.empty_like(input)
    if input.numel():
        compute = compute_dtype(input, grad)
        launch(
            "normalize_backward", ROWS_BACKWARD, (input, grad, None, out, norm, None), (4, 5), input.shape,
            dim % max(input.dim(), 1), compute, (floor(eps, compute_dtype(input)),),
            {"OP": NORMALIZE.value}, partials=1,
        )  # fmt: skip
    return out

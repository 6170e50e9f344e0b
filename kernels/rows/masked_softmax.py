"""masked_softmax: y = exp(x - top) / total over the kept elements of a row, or log y; 0 (-inf) at the others."""

import torch

from .row import computed_in, launch, thin
from .rows import LOG_SOFTMAX, ROWS, ROWS_BACKWARD, SOFTMAX


def masked_softmax(input, mask=None, dim=-1, log=False):
    dim = dim % max(input.dim(), 1)
    out = torch.empty_like(input)
    shape, compute = input.shape, computed_in(input)
    top, total = (torch.empty(thin(shape, dim), dtype=torch.float64, device=input.device) for _ in range(2))
    if top.numel():
        launch(
            "masked_softmax", ROWS, (input, mask, out, top, total), (3, 4), shape, dim, compute,
            constants={"OP": (LOG_SOFTMAX if log else SOFTMAX).value}, partials=3,
        )  # fmt: skip
    return out, top, total


def masked_softmax_backward(grad, input, top, total, mask=None, dim=-1, log=False):
    out = torch.empty_like(input)
    if input.numel():
        launch(
            "masked_softmax_backward", ROWS_BACKWARD, (input, grad, mask, out, top, total), (4, 5), input.shape,
            dim % max(input.dim(), 1), computed_in(input, grad),
            constants={"OP": (LOG_SOFTMAX if log else SOFTMAX).value}, partials=1,
        )  # fmt: skip
    return out

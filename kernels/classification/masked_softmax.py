"""masked_softmax, masked_log_softmax: y = exp(x - maximum) / total over the kept elements of a row, or log y. Where an
element is not kept, y is 0, and log y is -inf.
"""

import torch

from ..engine.buffers import allocator
from ..engine.elementwise import compute_dtype
from ..engine.row_backward import ROWS_BACKWARD
from ..engine.row_forward import LOG_SOFTMAX, ROWS, SOFTMAX
from ..engine.row_plan import launch, with_one_per_row


def masked_softmax(input, mask=None, dim=-1, log=False):
    dim = dim % max(input.dim(), 1)
    out = torch.empty_like(input)
    shape, compute = input.shape, compute_dtype(input)
    make = allocator(with_one_per_row(shape, dim), torch.float64, input.device)
    maximum, total = make(), make()
    if maximum.numel():
        launch(
            "masked_softmax", ROWS, (input, mask, out, maximum, total), (3, 4), shape, dim, compute,
            constants={"OP": (LOG_SOFTMAX if log else SOFTMAX).value}, partials=3,
        )  # fmt: skip
    return out, maximum, total


def masked_softmax_backward(grad, input, maximum, total, mask=None, dim=-1, log=False):
    out = torch.empty_like(input)
    if input.numel():
        launch(
            "masked_softmax_backward", ROWS_BACKWARD, (input, grad, mask, out, maximum, total), (4, 5), input.shape,
            dim % max(input.dim(), 1), compute_dtype(input, grad),
            constants={"OP": (LOG_SOFTMAX if log else SOFTMAX).value}, partials=1,
        )  # fmt: skip
    return out

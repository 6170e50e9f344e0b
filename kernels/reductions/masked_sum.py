"""masked_sum: sum of keep ? w * x : 0. Its backward, keep ? (g / denominator) * w : 0, is masked_mean's too."""

import torch
import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it beside every jit function)

from ..engine.elementwise import map_backward
from ..engine.reduce import reduce


@triton.jit
def term(x, p0, p1):
    return x


def masked_sum(input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None):
    return reduce(
        "masked_sum",
        term,
        input,
        None,
        mask,
        weight,
        None,
        None,
        dim,
        keepdim,
        False,
        0.0,
        0.0,
        empty_nan,
        dtype,
    )


def masked_sum_backward(grad, size, dtype, denominator=None, mask=None, weight=None, dim=None, keepdim=False):
    """The gradient of a whole input of shape `size`, contiguous."""
    dims = {d % max(len(size), 1) for d in dim} if dim else set(range(len(size)))
    if not keepdim:  # put the reduced dimensions back, each of size 1
        for d in sorted(dims) if size else ():
            grad = grad.unsqueeze(d)
            denominator = denominator if denominator is None else denominator.unsqueeze(d)
    out = torch.empty(tuple(size), dtype=dtype, device=grad.device)
    map_backward("masked_sum_backward", None, None, None, mask, weight, grad, denominator, out, None, 0.0, 0.0)
    return out

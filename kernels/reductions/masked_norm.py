"""Over the kept elements, masked_norm: (sum w |x|^p)^(1/p) for p of 1, 2, inf and -inf; safe_norm: masked_norm, at most
the largest finite number; masked_rms: sqrt(sum w x^2 / sum w); masked_sum_of_squares: sum w x^2.
"""

import torch
import triton
import triton.language as tl

from ..engine.scaling import inverse_beyond
from ..engine.state import ABSOLUTE, EXTREME, SQUARES
from .masked_amax import largest, smallest
from .statistic import launcher, statistic


@triton.jit
def absolute_sum(state, by, parameter):
    count, weights, pivot, shift, maximum, total = state
    return total, count * 0, count * 0 + 1.0, count > 0


@triton.jit
def norm(state, by, parameter):
    count, weights, pivot, shift, maximum, total = state
    root = tl.sqrt(total)
    return root * maximum, count * 0, inverse_beyond(root, maximum), count > 0


@triton.jit
def root_mean_square(state, by, parameter):
    count, weights, pivot, shift, maximum, total = state
    root = tl.sqrt(total / by)
    return root * maximum, count * 0, inverse_beyond(root * by, maximum), count > 0


@triton.jit
def square_sum(state, by, parameter):
    count, weights, pivot, shift, maximum, total = state
    return total * maximum * maximum, count * 0, count * 0 + 2.0, count > 0


ORDERS = {  # parameter -> (mode, finish, negate)
    1.0: (ABSOLUTE, absolute_sum, False),
    2.0: (SQUARES, norm, False),
    float("inf"): (EXTREME, largest, False),
    float("-inf"): (EXTREME, smallest, True),
}


def masked_norm(input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0, *,
                name="masked_norm", saturate=False):  # fmt: skip
    if parameter not in ORDERS:
        # (the public functions run any other order as plain torch)
        raise ValueError(f"{name}: the kernel knows the orders {', '.join(map(str, ORDERS))}, got {parameter}")
    mode, finish, negate = ORDERS[parameter]
    return statistic(
        name, mode, finish, input, mask, weight, dim, keepdim, empty_nan, dtype,
        absolute=True, negate=negate, saturate=saturate,
    )  # fmt: skip


def safe_norm(input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0):
    """A norm that is too large for the dtype saturates, with gradient 0 there."""
    value, origin, scale = masked_norm(
        input, mask, weight, dim, keepdim, empty_nan, dtype, parameter, name="safe_norm", saturate=True
    )
    if parameter == 1 and input.dtype == torch.float64:
        # No dtype is wider: the largest |x| shows whether the sum overflowed or has an infinite element.
        most = statistic("safe_norm", EXTREME, largest, input, mask, weight, dim, keepdim, absolute=True)[0]
        over = value.isinf() & most.isfinite()
        value = torch.where(over, torch.finfo(value.dtype).max, value)
        scale = torch.where(over, 0, scale)
    return value, origin, scale


masked_rms = launcher("masked_rms", SQUARES, root_mean_square)
masked_sum_of_squares = launcher("masked_sum_of_squares", SQUARES, square_sum)

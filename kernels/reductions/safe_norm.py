"""safe_norm: masked_norm that saturates, with gradient 0 there."""

import torch

from .fold import fold
from .masked_norm import masked_norm
from .masked_norm import masked_norm_backward as safe_norm_backward  # noqa: F401
from .statistic import LARGEST


def safe_norm(
    input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0
):  # fmt: skip
    value, origin, scale = masked_norm(
        input, mask, weight, dim, keepdim, empty_nan, dtype, parameter, name="safe_norm", saturate=True
    )
    if parameter == 1 and input.dtype == torch.float64:
        # Nothing wider tells a sum that overflowed from an infinite element: two more launches, in this case alone.
        largest = fold("safe_norm", LARGEST, input, mask, weight, dim, keepdim, absolute=True)[0]
        over = value.isinf() & largest.isfinite()
        value = torch.where(over, torch.finfo(value.dtype).max, value)
        scale = torch.where(over, 0, scale)
    return value, origin, scale

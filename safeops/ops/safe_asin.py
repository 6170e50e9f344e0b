"""safe_asin: the arc sine of x clamped to [-1, 1]."""

import torch

from safeops._library import declare_public
from safeops.ops._unary import Unary

_safe_asin = Unary(
    "safe_asin",
    # its derivative 1 / sqrt((1 - x)(1 + x)) does not cancel near the bounds, as that of torch.asin does
    lambda x: torch.atan2(x, ((1 - x) * (1 + x)).sqrt()),
    absent=lambda x, eps: x.abs() >= 1,
    stand_in=lambda x, eps, fill_value: x.clamp(-1, 1).asin(),
)

"""safe_exp: the exponential, which saturates."""

import torch

from safeops._library import declare_public
from safeops.ops._unary import Unary

_safe_exp = Unary(
    "safe_exp",
    torch.exp,
    absent=lambda x, eps: torch.zeros_like(x, dtype=torch.bool),
    stand_in=lambda x, eps, fill_value: x,
)

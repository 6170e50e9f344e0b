"""safe_sqrt: the square root, 0 for negative numbers, without a slope below eps."""

import torch

from safeops._library import declare_public
from safeops.ops._unary import Unary

_safe_sqrt = Unary(
    "safe_sqrt",
    torch.sqrt,
    absent=lambda x, eps: x < eps,
    stand_in=lambda x, eps, fill_value: torch.where(x > 0, x, 0).sqrt(),
)

"""safe_log: log(max(x, eps))."""

import torch

from safeops._library import declare_public
from safeops.ops._unary import Unary

_safe_log = Unary(
    "safe_log",
    torch.log,
    absent=lambda x, eps: x < eps,
    stand_in=lambda x, eps, fill_value: torch.full_like(x, eps).log(),
    positive=True,
)

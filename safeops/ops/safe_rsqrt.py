"""safe_rsqrt: 1 / sqrt(max(x, eps))."""

import torch

from safeops._library import declare_public
from safeops.ops._unary import Unary
from safeops.ops.safe_div import quotient

_safe_rsqrt = Unary(
    "safe_rsqrt",
    lambda x: quotient(1, x.sqrt()),  # the derivative of torch.rsqrt takes its cube, which may overflow over gradient 0
    absent=lambda x, eps: x < eps,
    stand_in=lambda x, eps, fill_value: torch.full_like(x, eps).rsqrt(),
    positive=True,
)

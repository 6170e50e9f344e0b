"""safe_reciprocal: 1 / x, as safe_div has it."""

import torch

from safeops._dtypes import saturate
from safeops._library import declare_public
from safeops.ops._unary import Unary
from safeops.ops.safe_div import quotient

_safe_reciprocal = Unary(
    "safe_reciprocal",
    lambda x: quotient(1, x),
    absent=lambda x, eps: x.abs() < eps,
    stand_in=lambda x, eps, fill_value: torch.full_like(x, fill_value),
)

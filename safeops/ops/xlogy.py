"""xlogy: input * log(other), 0 where input is 0."""

import torch

from safeops._library import declare_public
from safeops.ops._binary import Binary

# ---- definition


def _define(x, y, eps, fill_value, dtype):
    zero = x == 0  # masked out, whatever `other` is there
    product = torch.where(zero, 0, x) * torch.where(zero, 1, y).log()
    return torch.where(zero, 0, product).to(dtype)


# ---- op

_xlogy = Binary("xlogy", _define, safe=False)

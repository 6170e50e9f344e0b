"""The private names of torch that safeops uses, and what each is for: tests/test_private_torch.py shows that it holds."""

import torch
from torch.autograd import forward_ad

# ---- what runs around a call


def is_exporting():
    """torch.compiler.is_exporting(), which the Dynamo of torch 2.11 takes for True in every trace."""
    return torch.compiler._is_exporting_flag

"""Helpers for the tests of trace."""

import torch

from safeops.debug import trace


def traced(function, model=None):
    with trace(model, action="record") as tracer:
        function()
    return tracer


def leaf(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, requires_grad=True)

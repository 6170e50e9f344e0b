"""The matrix product of the definitions: in the operands' own dtype, whatever autocast says, in every derivative.

`torch.autocast(enabled=False)` around a product does not reach its backward, which would run in half where the user
calls backward inside an autocast region, or compiles it there. That of a Function does.
"""

import contextlib

import torch
from torch.compiler import is_compiling

from safeops.core.private_torch import is_autocast_available, is_exporting


def matmul(a, b):
    """a b^T: (..., N, D), (..., M, D) -> (..., N, M)."""
    if is_exporting():  # which of a Function takes the forward alone, and a constant comes out
        return _product(a, b)
    return (_Matmul if is_compiling() else _MatmulForwardMode).apply(a, b)


def without_autocast(x):
    """A context for products on x's device, which may be one that has no autocast."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if is_autocast_available(device) else contextlib.nullcontext()


def _product(a, b):
    with without_autocast(a):
        return a @ b.mT


class _Matmul(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a, b):
        return _product(a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        (a, b), needs = ctx.saved_tensors, ctx.needs_input_grad
        product = _product if is_compiling() else matmul  # (a trace of the backward has no second one)
        return product(grad, b.mT) if needs[0] else None, product(grad.mT, a.mT) if needs[1] else None


class _MatmulForwardMode(_Matmul):
    """With forward mode, which Dynamo does not take."""

    @staticmethod
    def jvp(ctx, da, db):
        a, b = ctx.saved_tensors
        parts = [matmul(x, y) for x, y in ((da, b), (a, db)) if x is not None and y is not None]
        return sum(parts[1:], parts[0])

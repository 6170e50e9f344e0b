"""The matrix product of the definitions: autocast does not change its dtype, nor that of its derivatives.

`torch.autocast(enabled=False)` around a product does not cover its backward: that would run in half if the user calls
or compiles backward inside an autocast region. The backward of an autograd Function disables autocast itself.

On CUDA, fp32 matrices that were computed from half tensors are multiplied on the tensor cores, with sums in fp32:
(1) each matrix is split into fp16 parts, x = high + low with high = fp16(x) and low = fp16(x - high);
(2) a b^T = a_high b_high^T + a_low b_high^T + a_high b_low^T, where the product of the two low parts is dropped.
The error is 2^-21 of the largest elements, where fp32 has 2^-24. The result of the backward is rounded to half, so the
gradient and the other factor are rounded to half first.
"""

import contextlib

import torch
from torch.compiler import is_compiling

from safeops.core.dtypes import HALF, to_one
from safeops.core.private_torch import is_autocast_available, is_exporting, transforms_active
from safeops.core.route import PLAIN


def matmul(a, b, half=None):
    """a b^T: (..., N, D), (..., M, D) -> (..., N, M). half: the half dtype that a and b were computed from, to multiply
    fp16 parts (if `takes_half`); None: an ordinary product."""
    if is_exporting():  # export keeps only the forward of an autograd Function
        return _product(a, b)
    return (_Matmul if is_compiling() else _MatmulForwardMode).apply(a, b, half)


def takes_half(*tensors):
    """True if matrices that were computed from these tensors may be multiplied as fp16 parts."""
    first, *others = (x.dtype for x in tensors)
    same = first in HALF and all(dtype == first for dtype in others)
    plain = all(type(x) in PLAIN and x.dim() == 2 for x in tensors)
    return same and plain and sums_wide(tensors[0].device) and not transforms_active() and not is_exporting()


def sums_wide(device):
    """True if torch returns a product of half matrices in fp32 (`torch.mm` with `out_dtype`)."""
    return device.type == "cuda" and torch.version.hip is None


def without_autocast(x):
    """A context without autocast on x's device; an empty one if the device has no autocast."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if is_autocast_available(device) else contextlib.nullcontext()


def _product(a, b):
    with without_autocast(a):
        return a @ b.mT


def wide_mm(a, b):
    """a b of half matrices, in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32)


def _product_of_halves(a, b):
    """a b^T from fp16 parts, as one product of the parts concatenated along D. Elements must be in fp16's range."""
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    a, b = torch.cat([a_high, a_low, a_high], 1), torch.cat([b_high, b_high, b_low], 1)
    with without_autocast(a):
        return wide_mm(a, b.mT)


def _halves(x):
    high = x.half()
    return high, (x - high).half()


def _narrow(x, half):
    """Returns (s x in half, s). For fp16, whose range is too small for gradients, s is a power of two; else None."""
    if half != torch.float16:
        return x.to(half), None
    low, high = torch.aminmax(x)
    largest = torch.maximum(-low, high)
    scale = torch.where(largest.isfinite() & (largest > 0), to_one(largest) * 2.0**14, 1)
    return (x * scale).to(half), scale


def _gradients_of_halves(grad, a, b, needs, half):
    (grad, *scales), results = _narrow(grad, half), []
    with without_autocast(a):
        for need, slope, factor in zip(needs, (grad, grad.mT), (b, a)):
            if need:
                factor, scale = _narrow(factor, half)
                product = wide_mm(slope, factor)
                for s in (*scales, scale):
                    product = product if s is None else product / s
            results.append(product if need else None)
    return *results, None


class _Matmul(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a, b, half):
        return _product(a, b) if half is None else _product_of_halves(a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, ctx.half = inputs
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)

    @staticmethod
    def backward(ctx, grad):
        (a, b), needs = ctx.saved_tensors, ctx.needs_input_grad[:2]
        if ctx.half is not None and (is_compiling() or not torch.is_grad_enabled()) and type(grad) in PLAIN:
            return _gradients_of_halves(grad, a, b, needs, ctx.half)
        product = _product if is_compiling() else matmul  # (a compiled backward is not differentiated)
        return product(grad, b.mT) if needs[0] else None, product(grad.mT, a.mT) if needs[1] else None, None


class _MatmulForwardMode(_Matmul):
    """`_Matmul` with a derivative for forward mode, which Dynamo does not accept."""

    @staticmethod
    def jvp(ctx, da, db, _):
        a, b = ctx.saved_tensors
        parts = [matmul(x, y) for x, y in ((da, b), (a, db)) if x is not None and y is not None]
        return sum(parts[1:], parts[0])

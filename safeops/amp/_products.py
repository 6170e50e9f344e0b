"""Products of a compiled fp32_region, whose backward is in fp32 too.

A compiler traces the backward where the call is, under the autocast that is on around the region: the region's own
end is not known there, and the products of the backward would be rounded to half. That of a Function is traced with
what it says itself. (Its forward is there once more, for no result of it, and the compiler leaves it out.)
"""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_NAMES = "matmul mm bmm mv addmm addmv addr addbmm baddbmm"
_METHODS = f"{_NAMES} __matmul__ __rmatmul__"
_FUNCTIONS = f"{_NAMES} einsum tensordot chain_matmul prelu conv1d conv2d conv3d conv_transpose1d conv_transpose2d"
_NN = "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu"
PRODUCTS = {
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(getattr(torch, name) for name in f"{_FUNCTIONS} conv_transpose3d".split()),
    *(getattr(F, name) for name in f"{_NN} scaled_dot_product_attention".split()),
    torch.linalg.multi_dot,
}  # those of autocast's list of half


class Products(TorchFunctionMode):
    """Inside a compiled region: each product of tensors with a gradient as a Function of its own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **kwargs)
        # (once each: Dynamo takes no tensor twice; those without a derivative last)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        tensors = [x for i, x in enumerate(tensors) if not any(x is y for y in tensors[:i])]
        tensors.sort(key=lambda x: not x.is_floating_point())

        def product(*values):
            def value_of(x):
                return next((v for t, v in zip(tensors, values) if t is x), x) if isinstance(x, torch.Tensor) else x

            return func(*map(value_of, args), **{key: value_of(x) for key, x in kwargs.items()})

        return _Product.apply(product, sum(x.is_floating_point() for x in tensors), *tensors)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, product, count, *tensors):
        ctx.product, ctx.count = product, count
        ctx.save_for_backward(*tensors)
        return product(*tensors)

    @staticmethod
    def backward(ctx, grad):
        operands, others = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        with torch.autocast(grad.device.type, enabled=False):
            _, gradients = torch.func.vjp(lambda *operands: ctx.product(*operands, *others), *operands)
            return None, None, *gradients(grad), *(None for _ in others)

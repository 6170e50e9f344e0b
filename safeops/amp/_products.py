"""Products of a compiled fp32_region, whose backward is in fp32 too.

A compiler traces the backward where the call is, under the autocast that is on around the region: the region's own
end is not known there, and the products of the backward would be rounded to half. That of a Function is traced with
what it says itself. (Its forward is there once more, for no result of it, and the compiler leaves it out.)
"""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from safeops.amp._nested import map_tensors

_NAMES = "matmul mm bmm mv addmm addmv addr addbmm baddbmm inner"
_METHODS = f"{_NAMES} __matmul__ __rmatmul__"
_FUNCTIONS = f"{_NAMES} einsum tensordot chain_matmul prelu conv1d conv2d conv3d conv_transpose1d conv_transpose2d"
_NN = "linear bilinear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu"
PRODUCTS = {
    *(getattr(torch.Tensor, name) for name in _METHODS.split()),
    *(getattr(torch, name) for name in f"{_FUNCTIONS} conv_transpose3d conv_tbc".split()),
    *(getattr(F, name) for name in f"{_NN} scaled_dot_product_attention".split()),
    *(torch.linalg.matmul, torch.linalg.multi_dot, torch.linalg.vecdot),
}  # those of autocast's list of half, and functions made of them


class Products(TorchFunctionMode):
    """Inside a compiled region: each product of tensors with a gradient as a Function of its own."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in PRODUCTS or func is F.scaled_dot_product_attention and _drops(*args, **kwargs):
            return func(*args, **kwargs)
        # (once each: Dynamo takes no tensor twice; those without a derivative last)
        tensors = []
        map_tensors(lambda x: tensors.append(x) or x, (args, kwargs))  # (einsum and multi_dot take them in lists)
        tensors = [x for i, x in enumerate(tensors) if not any(x is y for y in tensors[:i])]
        tensors.sort(key=lambda x: not x.is_floating_point())

        def product(*values):
            new_args, new_kwargs = map_tensors(
                lambda x: next(v for t, v in zip(tensors, values) if t is x), (args, kwargs)
            )
            return func(*new_args, **new_kwargs)

        return _Product.apply(product, sum(x.is_floating_point() for x in tensors), *tensors)


def _drops(query, key, value, attn_mask=None, dropout_p=0.0, *options, **more):
    """True for attention with dropout: backward computes a product once more, which would draw another dropout."""
    return dropout_p != 0


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

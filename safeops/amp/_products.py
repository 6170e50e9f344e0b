"""Matrix products of a compiled fp32_region, with a backward that is in fp32 too.

The compiler traces the backward under the autocast that is on around the region, so its products would be rounded to
half. The backward of an autograd Function is traced as it is written, and can switch autocast off: each product becomes
such a Function. (Its backward computes the forward once more by vjp; the compiler removes this unused result.)
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
}  # autocast's list of functions in half, and functions made of them


class Products(TorchFunctionMode):
    """The function mode of a compiled region: it runs each product as a `_Product`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in PRODUCTS or func is F.scaled_dot_product_attention and _drops(*args, **kwargs):
            return func(*args, **kwargs)
        # (each tensor once, as Dynamo takes no tensor twice; tensors without a derivative last)
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
    """True for attention with dropout: _Product's backward computes the product again, with another dropout."""
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

"""Defects of values and derivatives."""

import torch
from torch.autograd import forward_ad

from safeops.testing import Sample
from tests.testing.broken.plant import ROUGH, WEIGHTED, function, in_transform, plant
from tests.testing.toy import KEEP, WEIGHT, X, definition, wide


# Values --------------------------------------------------------------------------------------------------------------
@plant("value", "value in float16", "wrong")
def computes_in_half(x, mask, **_):
    return (torch.where(mask, x, 0).square().sum() / 2).to(wide(x))


@plant("gradient", "gradient of operand 0")
def half_the_gradient(x, mask, **options):
    return definition((x + x.detach()) / 2, mask, **options)


@plant("gradient", "no gradient reaches operand 'weight'", samples=[Sample((X, KEEP), {"weight": WEIGHT}, mask=1)])
def weight_cut_off(x, mask, weight=None, **options):
    return definition(x, mask, weight=weight.detach(), **options)


@plant("dtypes", "float16", "want torch.float32")
def returns_the_input_dtype(x, mask, **options):
    return definition(x, mask, **options).to(x.dtype)


@plant("mixed_dtypes", "in float16, float64", samples=WEIGHTED)
def weight_read_in_the_dtype_of_x(x, mask, weight=None, **options):
    return definition(x, mask, weight=weight.to(x.dtype), **options)


@plant("accumulation", "relative error")
def sums_in_half(x, mask, **_):
    terms = definition(x, mask, reduction="none")
    return terms.sum() if x.dtype == torch.float64 else terms.bfloat16().sum().float()


RATIO = [Sample((X, X + 4), {})]


@plant(
    "finite",
    "value in torch.float16",
    "for finite operands",
    samples=RATIO,
    reference=torch.div,
    finite=True,
    data=None,
)
def plain_division(a, b):
    return a / b


class Saturate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.limit = torch.finfo(x.dtype).max
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-ctx.limit, ctx.limit)


@plant("gradient_overflow", "+inf in the wrong places")
def saturates_the_gradient(x, mask, **options):
    return definition(Saturate.apply(x), mask, **options)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        da = grad * b if ctx.needs_input_grad[0] else None
        return da, grad * a if ctx.needs_input_grad[0] else torch.zeros_like(b)


@plant("partial_gradients", "when only [1] require one", samples=RATIO, reference=torch.mul, data=None)
def second_gradient_needs_the_first(a, b):
    return Product.apply(a, b)


# Derivatives ---------------------------------------------------------------------------------------------------------
@plant("gradcheck", "Jacobian mismatch")
def wrong_backward(x, mask, **options):
    return function(lambda ctx, g: g * torch.where(ctx.saved_tensors[1], ctx.saved_tensors[0] * 1.001, 0))(
        x, mask, **options
    )


@plant("gradgradcheck", "mismatch")
def gradient_taken_as_a_constant(x, mask, **options):
    return function(lambda ctx, g: g * torch.where(ctx.saved_tensors[1], ctx.saved_tensors[0].detach(), 0))(
        x, mask, **options
    )


@plant("forward_ad", "silently dropped", samples=ROUGH)
def drops_the_tangent(x, mask, **options):
    return definition(forward_ad.unpack_dual(x).primal if forward_ad._current_level >= 0 else x, mask, **options)


@plant("forward_ad", "tangent of output 0", samples=ROUGH)
def zero_tangent(x, mask, **options):
    x = (
        forward_ad.make_dual(forward_ad.unpack_dual(x).primal, torch.zeros_like(x))
        if forward_ad._current_level >= 0
        else x
    )
    return definition(x, mask, **options)


@plant("torch_func", "func.grad")
def detached_under_functorch(x, mask, **options):
    return definition(x.detach() if in_transform() else x, mask, **options)


def _first_only(info, in_dims, x, mask, reduction):
    x, mask = (t if d is None else t.movedim(d, 0)[0] for t, d in zip((x, mask), in_dims))
    return torch.stack([definition(x, mask, reduction=reduction)] * info.batch_size), 0


class Mapped(torch.autograd.Function):
    @staticmethod
    def forward(x, mask, reduction):
        return definition(x, mask, reduction=reduction)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        x, mask = ctx.saved_tensors
        return grad * torch.where(mask, x, 0), None, None

    vmap = staticmethod(_first_only)


@plant("vmap", "vmap over operands")
def vmap_rule_repeats_the_first(x, mask, **_):
    return Mapped.apply(x, mask, "sum")


@plant("batched_gradients", "raised RuntimeError")
def backward_writes_in_place(x, mask, **options):
    return function(lambda ctx, g: torch.zeros_like(ctx.saved_tensors[0]).copy_(g * ctx.saved_tensors[0]))(
        x, mask, **options
    )

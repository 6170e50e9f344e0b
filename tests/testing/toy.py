"""A small sound op, as a user of the harness would write one: a masked half square with its own forward and backward.

    half_square = the sum, or the elements, of  weight * x^2 / 2  over the kept elements

It has the parts of a real op: raw ops without autograd, a Function around them, the definition for transforms and
double backward, and the dispatcher's op with the same signature.
"""

import torch
from torch.autograd import forward_ad

from safeops.testing import Bad, Sample, Subject

lib = torch.library.Library("safeops_toy", "DEF")
lib.define("_forward(Tensor x, Tensor mask, Tensor? weight, bool reduce, ScalarType dtype) -> Tensor")
lib.define("_backward(Tensor grad, Tensor x, Tensor mask, Tensor? weight, bool reduce) -> Tensor")


def wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def definition(x, mask, *, weight=None, reduction="sum", empty="zero"):
    dtype = wide(x)
    keep = mask if weight is None else mask & (weight != 0)
    x = torch.where(keep, x.to(dtype), 0)
    terms = x * x / 2
    if weight is not None:
        terms = terms * torch.where(keep, weight.to(dtype), 0)
    if reduction == "none":
        return terms
    # An fp64 sum, rounded to fp32, does not depend on the order of its terms: one thread and many give the same bits.
    total = terms.double().sum().to(dtype)
    return torch.where(keep.expand(terms.shape).any(), total, float("nan") if empty == "nan" else 0.0)


# The kernels work on a few rows at a time, so that only the result is as large as the input.
def _rows(*tensors):
    if not tensors[0].dim() or not tensors[0].numel():
        return [tensors]
    rows = max(1, 4096 * len(tensors[0]) // tensors[0].numel())
    return zip(*(t.split(rows) for t in tensors))


def forward(x, mask, weight, reduce, dtype):
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    out = x.new_empty(() if reduce else shape, dtype=dtype)
    weight = x.new_ones(()) if weight is None else weight
    operands = [t.expand(shape) for t in (x, mask, weight)]
    if not reduce:
        for o, x, m, w in _rows(out, *operands):
            o.copy_(definition(x, m, weight=w, reduction="none"))
        return out
    total = sum(definition(x, m, weight=w, reduction="none").double().sum() for x, m, w in _rows(*operands))
    return out.copy_(total)


def backward(grad, x, mask, weight, reduce):
    shape, dtype = torch.broadcast_shapes(x.shape, mask.shape), wide(x)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    weight = x.new_ones(()) if weight is None else weight
    for o, g, a, m, w in _rows(out, *(t.expand(shape) for t in (grad, x, mask, weight))):
        dx = g.to(dtype) * a.to(dtype) * w.to(dtype)  # d/dx = g w x
        o.copy_(torch.where(m & (w != 0), dx, 0))
    return out


lib.impl("_forward", forward, "CompositeExplicitAutograd")
lib.impl("_backward", backward, "CompositeExplicitAutograd")
torch.library.register_fake("safeops_toy::_forward", lambda x, mask, weight, reduce, dtype: x.new_empty(
    () if reduce else torch.broadcast_shapes(x.shape, mask.shape), dtype=dtype), lib=lib)  # fmt: skip
torch.library.register_fake("safeops_toy::_backward", lambda grad, x, mask, weight, reduce: x.new_empty(
    torch.broadcast_shapes(x.shape, mask.shape)), lib=lib)  # fmt: skip


class HalfSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask, weight, reduce):
        ctx.save_for_backward(x, mask, weight)
        ctx.reduce = reduce
        return torch.ops.safeops_toy._forward(x, mask, weight, reduce, wide(x))

    @staticmethod
    def backward(ctx, grad):
        x, mask, weight = ctx.saved_tensors
        if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            with torch.enable_grad():
                again = x.view_as(x)
                out = definition(again, mask, weight=weight, reduction="sum" if ctx.reduce else "none")
                dx = torch.autograd.grad(out, again, grad, create_graph=torch.is_grad_enabled())[0]
        else:
            dx = torch.ops.safeops_toy._backward(grad, x, mask, weight, ctx.reduce)
        return dx.sum_to_size(x.shape), None, None, None


def half_square(x, mask, *, weight=None, reduction="sum", empty="zero"):
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"half_square: mask must be a bool tensor, got {got}")
    if empty == "raise" and not mask.any():
        raise ValueError(f"half_square: nothing is kept of {tuple(x.shape)}")
    plain = not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    tracked = weight is not None and weight.requires_grad
    if not plain or tracked or empty == "nan" or forward_ad._current_level >= 0 or type(x) is not torch.Tensor:
        return definition(x, mask, weight=weight, reduction=reduction, empty=empty)
    if torch.is_grad_enabled() and x.requires_grad:
        return HalfSquare.apply(x, mask, weight, reduction == "sum")
    return torch.ops.safeops_toy._forward(x, mask, weight, reduction == "sum", wide(x))


lib.define(
    'half_square(Tensor x, Tensor mask, *, Tensor? weight=None, str reduction="sum", str empty="zero") -> Tensor'
)
lib.impl("half_square", half_square, "CompositeImplicitAutograd")


def reference(x, mask, *, weight=None, reduction="sum", empty="zero"):
    keep = mask.expand(x.shape) if weight is None else (mask & (weight != 0)).expand(x.shape)
    terms = torch.where(keep, x, 0).square() / 2 * (1 if weight is None else torch.where(keep, weight, 0))
    if reduction == "none":
        return terms
    return torch.where(keep.any(), terms.sum(), float("nan") if empty == "nan" else 0.0)


def numbers(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=g, dtype=torch.float64) * 3 - 1.5


def flags(*shape):
    flat = torch.arange(torch.Size(shape).numel()) % 3 != 1
    return flat.reshape(shape)


X, KEEP, WEIGHT = numbers(4, 3), flags(4, 3), numbers(4, 3, seed=1).abs() + 0.25
SAMPLES = (
    Sample((X, KEEP), mask=1, name="sum", slow=True),
    Sample((X, KEEP), {"weight": WEIGHT, "reduction": "none"}, mask=1, differentiable=(0,), name="none, weighted"),
    Sample((numbers(2, 3, 4, 5), flags(2, 1, 4, 5)), mask=1, name="sum of four dimensions"),
)


def subject(op=half_square, samples=SAMPLES, **changes):
    """Returns the subject (op, definition, samples) of the sound op, or of a broken one in its place."""
    described = dict(
        reference=reference,
        samples=samples,
        torch_equivalent=lambda x, mask, *, weight=None, reduction="sum", empty="zero": reference(
            x, mask, weight=weight, reduction=reduction),
        direct=torch.ops.safeops_toy.half_square,
        namespace="safeops_toy",
        data=(0,),
        routes={"composite": definition},
        errors=[Bad((X, KEEP.double()), {}, TypeError, ("half_square", "mask", "bool", "torch.float64"))],
    )  # fmt: skip
    return Subject(op, **{**described, **changes})

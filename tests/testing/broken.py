"""One planted defect or more for every check of the harness: {check: [(what is wrong, subject, failure's words)]}."""

import dataclasses
import itertools

import torch
from torch.autograd import forward_ad

from safeops.testing import Sample
from tests.testing import toy
from tests.testing.toy import KEEP, WEIGHT, X, definition, half_square, subject, wide

DEFECTS: dict[str, list] = {}
WEIGHTED = (toy.SAMPLES[1],)
ROUGH = (dataclasses.replace(toy.SAMPLES[0], smooth=False),)
in_transform = torch._C._are_functorch_transforms_active


def plant(check, *words, **changes):
    """Register the decorated op as a defect that `check` must find, with these words in the failure."""

    def register(op):
        DEFECTS.setdefault(check, []).append((op.__name__, subject(op, **changes), words))
        return op

    return register


def function(backward, forward=None, **statics):
    """The op with a Function of this backward(ctx, grad) -> dx; ctx.saved_tensors is (x, mask)."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mask, reduction):
            ctx.save_for_backward(x, mask)
            return (forward or definition)(x.detach(), mask, reduction=reduction)

        @staticmethod
        def backward(ctx, grad):
            return backward(ctx, grad).to(ctx.saved_tensors[0].dtype), None, None

    for name, value in statics.items():
        setattr(Broken, name, staticmethod(value))
    return lambda x, mask, weight=None, reduction="sum", empty="zero": Broken.apply(x, mask, reduction)


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


# Masks ---------------------------------------------------------------------------------------------------------------
@plant("masked_garbage", "changed by nan under the mask")
def multiplies_by_the_mask(x, mask, **_):
    return (x.to(wide(x)) * mask).square().sum() / 2


@plant("masked_garbage", "gradient of")
def selects_after_the_arithmetic(x, mask, **_):  # the where trap: the value is right, the gradient is 0 * inf
    return torch.where(mask, x.to(wide(x)).square() / 2, 0).sum()


@plant("masked_upstream", "upstream nan", samples=[Sample((X, KEEP), {"reduction": "none"}, mask=1)])
def backward_multiplies_by_the_mask(x, mask, **options):
    return function(lambda ctx, g: g * torch.where(ctx.saved_tensors[1], ctx.saved_tensors[0], 0))(x, mask, **options)


@plant("masked_garbage_transforms", "vmap", "under the mask")
def multiplies_by_the_mask_under_vmap(x, mask, **options):
    mapped = (
        torch._C._functorch.is_batchedtensor(mask) or torch._C._functorch.is_gradtrackingtensor(x) and in_transform()
    )
    return (
        multiplies_by_the_mask(x, mask) if mapped and forward_ad._current_level < 0 else definition(x, mask, **options)
    )


@plant("weight_zero", "where weight is 0", samples=WEIGHTED)
def multiplies_by_the_weight(x, mask, weight=None, **_):
    return torch.where(mask, x.to(wide(x)), 0).square() / 2 * weight.to(wide(x))


@plant("kept_nonfinite", "NaN in the wrong places")
def swallows_nan(x, mask, **options):
    return definition(torch.fmax(x, torch.full_like(x, -torch.finfo(x.dtype).max)), mask, **options)


@plant("kept_upstream", "nan for the first upstream gradient", "want nan")
def swallows_a_nan_gradient(x, mask, **options):
    return function(lambda ctx, g: g.nan_to_num(0) * torch.where(ctx.saved_tensors[1], ctx.saved_tensors[0], 0))(
        x, mask, **options
    )


@plant("nothing_kept", "detached")
def fresh_zero_when_nothing_is_kept(x, mask, **options):
    return definition(x, mask, **options) if mask.any() else torch.zeros((), dtype=wide(x))


@plant("nothing_kept", "empty='nan'")
def ignores_empty(x, mask, empty="zero", **options):
    return definition(x, mask, **options)


# Layouts -------------------------------------------------------------------------------------------------------------
@plant("layouts", "transposed operands")
def reads_as_if_contiguous(x, mask, **options):
    return definition(torch.as_strided(x, x.shape, torch.empty(x.shape).stride()), mask, **options)


@plant("upstream_layouts", "upstream gradient", samples=WEIGHTED)
def reads_the_upstream_gradient_as_if_contiguous(x, mask, weight=None, **options):
    def backward(ctx, grad):
        flat = torch.as_strided(grad, grad.shape, torch.empty(grad.shape).stride())
        return flat * ctx.saved_tensors[0] * torch.where(ctx.saved_tensors[1], weight, 0)

    return function(backward, lambda *a, **k: definition(*a, **k, weight=weight))(x, mask, **options)


@plant("sizes", "empty")
def mean_times_count(x, mask, **_):
    terms = definition(x, mask, reduction="none")
    return terms.mean() * terms.numel()


# Memory --------------------------------------------------------------------------------------------------------------
@plant("inputs_unchanged", "operand 0 was changed")
def masks_in_place(x, mask, **options):
    with torch.no_grad():
        x.masked_fill_(~mask, 0)
    return definition(x.clone(), mask, **options)


@plant("inputs_unchanged", "upstream gradient 0 was changed")
def writes_the_upstream_gradient(x, mask, **options):
    return function(lambda ctx, g: g.mul_(2) / 2 * torch.where(ctx.saved_tensors[1], ctx.saved_tensors[0], 0))(
        x, mask, **options
    )


@plant("saved_bytes", "bytes beside the inputs' own")
def saves_an_upcast_copy(x, mask, **options):
    return definition(x, mask, **options)


class KeepsBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        out = torch.where(mask, x, 0)
        ctx.save_for_backward(x, mask, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[2], None


@plant("saved_bytes", "bytes beside the inputs' own")
def saves_its_result_beside_the_input(x, mask, **_):
    return KeepsBoth.apply(x, mask)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        ctx.dx = torch.where(mask, x, 0)
        return (ctx.dx.to(wide(x)) ** 2).sum() / 2

    @staticmethod
    def backward(ctx, grad):
        return (grad * ctx.dx).to(ctx.dx.dtype), None


@plant("saved_bytes", "outside save_for_backward")
def keeps_a_tensor_on_ctx(x, mask, **_):
    return Keeps.apply(x, mask)


def leaves_the_last_unwritten(allocate):
    def op(x, mask, weight=None, **options):
        right = definition(x.detach(), mask, weight=weight, reduction="none")
        out = allocate(right)
        out.view(-1)[:-1] = right.flatten()[:-1]
        return out

    return op


def through_the_dispatcher(like):
    return torch.empty_like(like)


def below_the_dispatcher(like):
    """As a C++ kernel allocates through at::detail: torch's deterministic fill does not see it."""
    storage = torch.UntypedStorage(like.nbytes)
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, torch.empty(like.shape).stride())


for place in (through_the_dispatcher, below_the_dispatcher):
    op = leaves_the_last_unwritten(place)
    op.__name__ = f"leaves_an_element_unwritten_{place.__name__}"
    plant("uninitialized", "uninitialised memory", samples=[dataclasses.replace(WEIGHTED[0], differentiable=())])(op)


@plant("peak_memory", "a copy was made")
def upcasts_first(x, mask, **options):
    return definition(x, mask, **options)


# Execution -----------------------------------------------------------------------------------------------------------
calls = itertools.count()


@plant("repeatable", "differs from run to run")
def depends_on_the_run(x, mask, **options):
    return definition(x, mask, **options) * (1 + 1e-5 * next(calls))


@plant("threads", "threads differ from one")
def a_partial_sum_per_thread(x, mask, **_):
    terms = definition(x, mask, reduction="none").flatten()
    return sum(part.sum().bfloat16() for part in terms.chunk(torch.get_num_threads())).to(wide(x))


@plant("no_sync", "aten::is_nonzero called by Python")
def asks_whether_anything_is_kept(x, mask, **options):
    return definition(x, mask, **options) if mask.any() else definition(x, mask, **options) * 0


@plant("no_sync", "aten::nonzero called by aten::index")
def indexes_with_a_mask(x, mask, **_):
    return x.to(wide(x))[mask.expand(x.shape)].square().sum() / 2


toy.lib.define("_lies(Tensor x) -> Tensor")
toy.lib.impl("_lies", lambda x: x.to(wide(x)).clone(), "CompositeExplicitAutograd")
torch.library.register_fake("safeops_toy::_lies", lambda x: torch.empty_like(x), lib=toy.lib)


@plant("opcheck", "opcheck of safeops_toy._lies", direct=None)
def fake_kernel_lies(x, mask, **options):
    torch.ops.safeops_toy._lies(x.detach())
    return definition(x, mask, **options)


def detached(*args, **kwargs):
    return half_square(*args, **kwargs).detach()


plant("direct", "detached", direct=detached)(half_square)


@plant("autocast", "under torch.float16 autocast")
def computed_by_an_autocast_op(x, mask, **_):
    kept = torch.where(mask, x.to(wide(x)), 0).flatten()
    return torch.mm(kept[None], kept[:, None]).sum() / 2


def other_formula(x, mask, **options):
    return definition(x, mask, **options) * 1.001


plant("routes", "the composite route differs", routes={"composite": other_formula})(half_square)


@plant("errors", "was accepted")
def takes_float_masks(x, mask, **options):
    return definition(x, mask.bool(), **options)


@plant("errors", "the message lacks", "'torch.float64'")
def says_too_little(x, mask, **options):
    if mask.dtype != torch.bool:
        raise TypeError("half_square: mask must be a bool tensor")
    return definition(x, mask, **options)


@plant("cuda_graph", "raised", device="cuda")
def reads_a_value_while_captured(x, mask, **options):
    return definition(x, mask, **options) if mask.any().item() else None


# Compilation ---------------------------------------------------------------------------------------------------------
@plant("compile", "raised Unsupported")
def breaks_the_graph(x, mask, **options):
    torch._dynamo.graph_break()
    return definition(x, mask, **options)


@plant("compile", "compiled by aot_eager")
def another_formula_when_compiled(x, mask, **options):
    return definition(x, mask, **options) * (1.001 if torch.compiler.is_compiling() else 1)


@plant("inductor", "compiled by inductor")
def another_formula_for_inductor(x, mask, **options):
    return definition(x, mask, **options) * (1.001 if torch.compiler.is_compiling() else 1)


@plant("export", "detached")
def exported_without_gradient(x, mask, **options):
    out = definition(x, mask, **options)
    return out.detach() if torch.compiler.is_exporting() else out


@plant("export", "check export")
def exports_its_first_size(x, mask, **options):
    return definition(x, mask, **options) * (x.new_tensor(1 / len(x)) if torch.compiler.is_exporting() else 1 / len(x))

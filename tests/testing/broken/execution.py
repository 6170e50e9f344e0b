"""Defects of memory, execution and compilation."""

import dataclasses
import itertools

import torch

from tests.testing import toy
from tests.testing.broken.plant import WEIGHTED, function, plant
from tests.testing.toy import definition, half_square, wide


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
    """Returns memory like `like`, allocated as C++ kernels do through at::detail, which torch's deterministic fill does
    not see."""
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


toy.lib.define("_eager(Tensor x) -> Tensor")
toy.lib.impl("_eager", lambda x: x.to(wide(x)).clone(), "CPU")


@plant("opcheck_traced", "opcheck of safeops_toy._eager", direct=None)
def has_no_fake_kernel(x, mask, **options):
    torch.ops.safeops_toy._eager(x.detach())
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

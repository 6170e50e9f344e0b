"""Compiled functions and autograd around an op: derivatives inside, one tensor twice, no upstream gradient."""

import io

import pytest
import torch
import torch.autograd.forward_ad as fwAD

import safeops
from tests.contract.common import DEVICE, unless_first
from tests.ops import RECORDS
from tests.ops.record import firsts

COUNTS = "masked_count", "router_load"
DIFFERENTIABLE = [n for n, r in RECORDS.items() if not isinstance(r.call, str) and n not in COUNTS]
TRACED = [n for n in DIFFERENTIABLE if not RECORDS[n].no_route and n != "apply_where"]


@pytest.mark.slow
@pytest.mark.parametrize("name", map(unless_first, TRACED))
def test_derivatives_inside_a_compiled_function(name):
    function, x = RECORDS[name].of_one(DEVICE)
    direction = x.square()  # along a constant a variance has slope 0, along x a direction x / |x| has

    def f(x):
        return function(x / 2).sigmoid().sum()  # sigmoid: finite even for -inf

    def dual(x):
        with fwAD.dual_level():
            return fwAD.unpack_dual(f(fwAD.make_dual(x, direction))).tangent

    inners = (torch.func.grad(f), lambda x: torch.func.jvp(f, (x,), (direction,))[1], dual)
    turn = TRACED.index(name) % len(inners)
    for inner in inners if name in firsts() else inners[turn : turn + 1]:  # first ops: all three
        torch._dynamo.reset()
        compiled = torch.compile(inner, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled, inner(x))
        assert compiled.abs().sum() > 0


def several(name):
    """Returns the names of the floating arguments that one tensor can fill: those of the first's shape. Not `target`:
    it would make a loss 0."""
    shape = RECORDS[name].call[next(iter(RECORDS[name].tensors()))].shape
    floating = [key for key, x in RECORDS[name].tensors().items() if x.is_floating_point() and x.shape == shape]
    return [key for key in floating if key != "target"]


@pytest.mark.parametrize("name", [unless_first(name) for name in TRACED if len(several(name)) > 1])
def test_one_tensor_as_two_operands_compiles(name):
    function, _ = RECORDS[name].of_one(DEVICE)
    p = torch.rand(5, 6, device=DEVICE, requires_grad=True)

    def twice(p):
        return function(p, **dict.fromkeys(several(name), p))

    torch._dynamo.reset()
    got, want = torch.compile(twice, backend="aot_eager", fullgraph=True)(p), twice(p)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), p), torch.autograd.grad(want.sum(), p))


class Cut(torch.autograd.Function):
    """An identity with backward None: the op before it gets None as its upstream gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_without_an_upstream_gradient_there_is_none(name):
    function, x = RECORDS[name].of_one(DEVICE)
    x = x.requires_grad_()
    (dx,) = torch.autograd.grad(Cut.apply(function(x)).sum(), x, allow_unused=True)
    assert dx is None
    (dx,) = torch.autograd.grad(Cut.apply(function(x)).sum() + x.sum(), x)
    assert torch.equal(dx, torch.ones_like(x))


CHANGING = {  # one op for each way in which a backward gets the operands' sizes
    "masked_sum": lambda x, m: safeops.masked_sum(x, m, 1),
    "masked_var": lambda x, m: safeops.masked_var(x, m),
    "masked_fill": lambda x, m: safeops.masked_fill(x, m[0], 0.5),
    "masked_scatter": lambda x, m: safeops.masked_scatter(x, m, x.detach()),
    "masked_compact": lambda x, m: safeops.masked_compact(x, m, capacity=7)[0],
    "masked_softmax": lambda x, m: safeops.masked_softmax(x, m),
    "mse_loss": lambda x, m: safeops.mse_loss(x, x.detach()[:1] + 1, mask=m),
    "safe_div": lambda x, m: safeops.safe_div(x, x.detach()[:1]),
    "safe_gather": lambda x, m: safeops.safe_gather(x, 1, m.long()),
    "safe_index_select": lambda x, m: safeops.safe_index_select(x, 1, m[0].long()),
}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", CHANGING)
def test_sizes_that_change_compile_with_a_gradient(name, dynamic):
    """A call with a gradient must compile for sizes that change. dynamic=None: Dynamo compiles for the first size, and
    again with a symbol for the size when the second differs."""
    torch._dynamo.reset()
    function = CHANGING[name]
    compiled = torch.compile(function, dynamic=dynamic, fullgraph=True, backend="aot_eager")
    for shape in ((3, 5), (4, 7), (6, 2)):
        x, mask = torch.randn(shape, device=DEVICE), torch.rand(shape, device=DEVICE) < 0.5
        got, want = (torch.autograd.grad(f(x.requires_grad_(), mask).sum(), x)[0] for f in (compiled, function))
        assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", [unless_first(n) for n, record in RECORDS.items() if not isinstance(record.call, str)])
def test_a_module_that_keeps_operands_compiles_for_dynamic_sizes(name):
    """Dynamo knows the sizes of a module's own tensors as numbers, and its input's as symbols; one graph has both."""
    record = RECORDS[name]
    (first, x), *rest = record.tensors().items()

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for key, value in rest:
                self.register_buffer(key, value.to(DEVICE))

        def forward(self, x):
            return getattr(safeops, name)(**{**record.call, **dict(self.named_buffers()), first: x})

    torch._dynamo.reset()
    module, x = Module(), x.to(DEVICE)
    got = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, module(x), equal_nan=True)


def test_a_value_without_a_gradient_may_be_written_before_backward():
    x = torch.randn(6, device=DEVICE, requires_grad=True)
    value = torch.zeros((), device=DEVICE)
    y = safeops.masked_fill(x, x > 0, value)
    value.add_(1)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, (x <= 0).to(x.dtype))


NAMED_TUPLES = {
    "token_log_probs": lambda x, y: safeops.token_log_probs(x, y),
    "token_log_probs(with_argmax)": lambda x, y: safeops.token_log_probs(x, y, with_argmax=True),
    "linear_token_log_probs": lambda x, y: safeops.linear_token_log_probs(x, torch.ones_like(x), y),
}


@pytest.mark.parametrize("name", NAMED_TUPLES)
def test_an_exported_program_that_returns_a_named_tuple_can_be_saved(name):
    class Program(torch.nn.Module):
        def forward(self, x, y):
            return NAMED_TUPLES[name](x, y)

    example, file = (torch.randn(2, 3), torch.tensor([0, 1])), io.BytesIO()
    torch.export.save(torch.export.export(Program(), example), file)
    file.seek(0)
    got, want = torch.export.load(file).module()(*example), Program()(*example)
    assert type(got) is type(want)
    torch.testing.assert_close(tuple(got), tuple(want))


def test_an_exported_program_that_returns_combined_losses_can_be_saved():
    class Program(torch.nn.Module):
        def forward(self, x):
            return safeops.combine_losses({"a": x.sum(), "b": (x.mean(), 0.5)})

    # Saved, not loaded: torch's loader refuses a program with a string among its results.
    torch.export.save(torch.export.export(Program(), (torch.randn(2, 3),)), io.BytesIO())

"""Which route runs: an op must take its fast path, and only where that is right."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import safeops
from safeops.core.op import registry
from tests.ops import RECORDS

CALLS = {name: record.of_one() for name, record in RECORDS.items() if name in registry and not record.no_route}
FORWARD = {"masked_log_softmax": "_masked_softmax"}  # {op: raw forward op}, where the names differ
# Ops that save their result for backward: torch detaches it.
SAVE_THEIR_RESULT = ("cosine_similarity", "masked_softmax", "segment_max")
# {op: number of results that its kernel returns in one tensor}
TAKEN_APART = {"token_log_probs": 3}
each_op = pytest.mark.parametrize("name", sorted(CALLS))


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.name())
        return func(*args, **(kwargs or {}))


def dispatched(function, *args):
    with Recorder() as recorder:
        result = function(*args)
    return result, recorder.ops


@each_op
def test_eager_cpu_tensors_take_the_kernel_both_ways(name):
    assert registry[name].cpu, "the C++ extension is not built"
    call, x = CALLS[name]
    x = x.clone().requires_grad_()
    loss, forward = dispatched(lambda: call(x))
    raw = FORWARD.get(name, f"_{name}")
    kept = ["aten::detach"] if name in SAVE_THEIR_RESULT else []
    views = ["aten::select.int"] * TAKEN_APART.get(name, 0)
    assert forward == [f"safeops::{raw}", *kept, *views]  # one kernel and no other computation
    grad = torch.ones_like(loss)
    _, backward = dispatched(lambda: torch.autograd.grad(loss, x, grad))
    owner = {"masked_fill": "_masked_fill", "masked_softmax": "_masked_softmax_slope"}.get(name, registry[name].raw[-1])
    assert [op for op in backward if op.startswith("safeops")] == [f"safeops::{owner}"]
    assert all(op.startswith("safeops") or op in ("aten::detach", "aten::select_backward") for op in backward), backward


@each_op
def test_transforms_dual_numbers_and_subclasses_take_the_composite(name):
    class Wrapper(torch.Tensor):
        pass

    call, x = CALLS[name]
    runs = {
        "grad": lambda: torch.func.grad(lambda x: call(x).sum())(x),
        "vmap": lambda: torch.func.vmap(lambda s: call(x * s))(torch.ones(2)),
        "jvp": lambda: torch.func.jvp(call, (x,), (torch.ones_like(x),)),
        "subclass": lambda: call(x.as_subclass(Wrapper)),
    }
    for transform, run in runs.items():
        _, ops = dispatched(run)
        assert ops and not any(op.startswith("safeops") for op in ops), (transform, ops)


@each_op
def test_second_derivative_goes_through_the_composite(name):
    call, x = CALLS[name]
    x = x.clone().requires_grad_()
    grad = torch.ones_like(call(x), requires_grad=True)
    (dx,) = torch.autograd.grad(call(x), x, grad, create_graph=True)
    assert dx.requires_grad


@each_op
def test_compile_on_the_cpu_keeps_the_kernel_and_export_does_not(name):
    graphs, (call, x) = [], CALLS[name]

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(call, backend=backend, fullgraph=True)(x)
    assert f"torch.ops.safeops.{FORWARD.get(name, f'_{name}')}" in graphs[0]

    class Module(torch.nn.Module):
        def forward(self, x):
            return call(x)

    exported = torch.export.export(Module(), (x,))
    assert "safeops" not in exported.graph_module.code


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name, part", [("mse_loss", "masked_count"), ("masked_sum", "masked_count"),
                                        ("masked_mean", "masked_sum"), ("masked_var", "masked_count")])  # fmt: skip
def test_over_ranks_the_kernels_that_an_op_is_made_of_must_run_here_too(name, part, mesh, monkeypatch):
    from torch.distributed.tensor import Shard, distribute_tensor

    def call(x):
        arguments = (x, x * 0.5) if name == "mse_loss" else (x,)
        return getattr(safeops, name)(*arguments, weight=x.abs() + 1)

    plain = torch.randn(4, 3)
    x = distribute_tensor(plain, mesh, [Shard(0)])
    _, ran = dispatched(call, x)
    assert f"safeops::_{part}" in ran
    monkeypatch.setattr(registry[part], "cpu", False)
    result, ran = dispatched(call, x)
    assert f"safeops::_{part}" not in ran
    torch.testing.assert_close(result.full_tensor(), call(plain))


def test_direct_call_of_the_registered_op_has_autograd():
    x, y = torch.randn(2, 3, requires_grad=True), torch.full((2, 3), 2.0)
    (direct,) = torch.autograd.grad(torch.ops.safeops.mse_loss(x, y, mask=y > x), x)
    (public,) = torch.autograd.grad(safeops.mse_loss(x, y, mask=y > x), x)
    assert torch.equal(direct, public)

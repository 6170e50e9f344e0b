"""Which route runs: a fast path that is never taken does not exist, and one taken where it is wrong is a defect."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import safeops
from safeops._op import registry

MASK = torch.tensor([[True, False, True], [True, True, False]])
TARGET = torch.full((2, 3), 2.0)
INDEX = torch.tensor([[0, 2, 7], [1, -1, 0]])
ROW = torch.tensor([0, 2, 7])
CALLS = {
    "masked_fill": lambda x: safeops.masked_fill(x, MASK, 2.0),
    "safe_div": lambda x: safeops.safe_div(x, TARGET),
    "safe_reciprocal": lambda x: safeops.safe_reciprocal(x),
    "safe_log": lambda x: safeops.safe_log(x),
    "safe_sqrt": lambda x: safeops.safe_sqrt(x),
    "safe_rsqrt": lambda x: safeops.safe_rsqrt(x),
    "safe_exp": lambda x: safeops.safe_exp(x),
    "safe_acos": lambda x: safeops.safe_acos(x),
    "safe_asin": lambda x: safeops.safe_asin(x),
    "safe_pow": lambda x: safeops.safe_pow(x, TARGET),
    "safe_atan2": lambda x: safeops.safe_atan2(x, TARGET),
    "xlogy": lambda x: safeops.xlogy(x, TARGET),
    "masked_sum": lambda x: safeops.masked_sum(x, MASK, 1),
    "masked_mean": lambda x: safeops.masked_mean(x, MASK),
    "masked_var": lambda x: safeops.masked_var(x, MASK, 1),
    "masked_std": lambda x: safeops.masked_std(x, MASK, 1),
    "masked_amax": lambda x: safeops.masked_amax(x, MASK, 1),
    "masked_amin": lambda x: safeops.masked_amin(x, MASK),
    "masked_norm": lambda x: safeops.masked_norm(x, MASK, 1),
    "safe_norm": lambda x: safeops.safe_norm(x, 1),
    "masked_sum_of_squares": lambda x: safeops.masked_sum_of_squares(x, MASK),
    "masked_rms": lambda x: safeops.masked_rms(x, MASK),
    "masked_logsumexp": lambda x: safeops.masked_logsumexp(x, MASK, 1),
    "masked_compact": lambda x: safeops.masked_compact(x, MASK, capacity=5)[0],
    "masked_scatter": lambda x: safeops.masked_scatter(x, MASK, TARGET),
    "safe_gather": lambda x: safeops.safe_gather(x, 1, INDEX),
    "safe_index_select": lambda x: safeops.safe_index_select(x, 1, ROW),
    "masked_softmax": lambda x: safeops.masked_softmax(x, MASK),
    "masked_log_softmax": lambda x: safeops.masked_log_softmax(x, MASK),
    "normalize": lambda x: safeops.normalize(x),
    "cosine_similarity": lambda x: safeops.cosine_similarity(x, TARGET),
    "mse_loss": lambda x: safeops.mse_loss(x, TARGET, mask=MASK),
    "l1_loss": lambda x: safeops.l1_loss(x, TARGET, mask=MASK),
    "smooth_l1_loss": lambda x: safeops.smooth_l1_loss(x, TARGET, mask=MASK),
    "huber_loss": lambda x: safeops.huber_loss(x, TARGET, mask=MASK),
}
FORWARD = {"masked_log_softmax": "_masked_softmax"}  # where it is not the op's own name
SAVE_THEIR_RESULT = ("cosine_similarity", "masked_softmax")  # torch detaches a result that is saved for backward
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


def test_every_op_is_covered():
    # a count has no gradient, the size of a selection depends on the data, and scans are of lists
    others = {"masked_count", "masked_select", "health", "grad_norm", "clip_grad_norm_"}
    assert set(CALLS) == set(registry) - others


@each_op
def test_eager_cpu_tensors_take_the_kernel_both_ways(name):
    assert registry[name].cpu, "the C++ extension is not built"
    x = torch.ones(2, 3, requires_grad=True)
    loss, forward = dispatched(lambda: CALLS[name](x))
    raw = FORWARD.get(name, f"_{name}")
    kept = ["aten::detach"] if name in SAVE_THEIR_RESULT else []
    assert forward == [f"safeops::{raw}", *kept]  # one op, and nothing beside it
    grad = torch.ones_like(loss)
    _, backward = dispatched(lambda: torch.autograd.grad(loss, x, grad))
    owner = {"masked_fill": "_masked_fill", "masked_softmax": "_masked_softmax_slope"}.get(name, registry[name].raw[-1])
    assert [op for op in backward if op.startswith("safeops")] == [f"safeops::{owner}"]
    assert all(op.startswith("safeops") or op == "aten::detach" for op in backward), backward


@each_op
def test_transforms_dual_numbers_and_subclasses_take_the_composite(name):
    class Wrapper(torch.Tensor):
        pass

    x = torch.ones(2, 3)
    runs = {
        "grad": lambda: torch.func.grad(lambda x: CALLS[name](x).sum())(x),
        "vmap": lambda: torch.func.vmap(lambda s: CALLS[name](x * s))(torch.ones(2)),
        "jvp": lambda: torch.func.jvp(CALLS[name], (x,), (torch.ones_like(x),)),
        "subclass": lambda: CALLS[name](x.as_subclass(Wrapper)),
    }
    for transform, run in runs.items():
        _, ops = dispatched(run)
        assert ops and not any(op.startswith("safeops") for op in ops), (transform, ops)


@each_op
def test_second_derivative_goes_through_the_composite(name):
    x = torch.ones(2, 3, requires_grad=True)
    grad = torch.ones_like(CALLS[name](x), requires_grad=True)
    (dx,) = torch.autograd.grad(CALLS[name](x), x, grad, create_graph=True)
    assert dx.requires_grad


@each_op
def test_compile_on_the_cpu_keeps_the_kernel_and_export_does_not(name):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(CALLS[name], backend=backend, fullgraph=True)(torch.ones(2, 3))
    assert f"torch.ops.safeops.{FORWARD.get(name, f'_{name}')}" in graphs[0]

    class Module(torch.nn.Module):
        def forward(self, x):
            return CALLS[name](x)

    exported = torch.export.export(Module(), (torch.ones(2, 3),))
    assert "safeops" not in exported.graph_module.code


def test_unverified_kernels_need_the_switch():
    """Without a record, and with it, in a process of its own: the switch is read at import."""
    code = (
        "import safeops._op as o\n"
        "o.has_kernel = lambda name, key: True\n"
        "op = o.registry['mse_loss']\n"
        "print(o.Op('probe', op.forward, op.backward).cuda)"
    )
    for switch, expected in (("0", "False"), ("1", "True")):
        env = {**os.environ, "SAFEOPS_UNVERIFIED": switch}
        out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == expected


def test_direct_call_of_the_registered_op_has_autograd():
    x = torch.randn(2, 3, requires_grad=True)
    (direct,) = torch.autograd.grad(torch.ops.safeops.mse_loss(x, TARGET, mask=MASK), x)
    (public,) = torch.autograd.grad(CALLS["mse_loss"](x), x)
    assert torch.equal(direct, public)

"""trace under checkpointing, custom and second derivatives, DDP, torch.compile, functorch, and for unusual tensors."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.debug.tracing import leaf, traced


class Inner(torch.nn.Module):
    def forward(self, x):
        return torch.sqrt(x * 0)  # HERE


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), Inner())

    def step():
        checkpoint(model, torch.ones(1, 2, requires_grad=True), use_reentrant=reentrant).sum().backward()

    report = traced(step, model).report
    assert report.phase == "backward" and report.line.text.endswith("# HERE") and report.module == "1 (Inner)"


def test_a_recomputation_is_a_forward_pass():
    calls = []

    def forward(x):
        calls.append(1)
        return torch.log(x * (len(calls) < 2)) * x  # HERE

    def step():
        checkpoint(forward, leaf(1.0, 2.0), use_reentrant=False).sum().backward()

    report = traced(step).report
    assert len(calls) == 2 and report.op == "log" and report.phase == "forward"
    assert report.line.text.endswith("# HERE")


class Reciprocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / x  # HERE


def test_a_custom_backward_has_a_line_of_its_own():
    report = traced(lambda: Reciprocal.apply(leaf(0.0, 1.0)).sum().backward()).report
    assert report.op == "div" and report.line.function == "backward" and report.line.text.endswith("# HERE")


def test_an_op_of_a_hook_is_advised_on_by_itself():
    x = leaf(1.0, 2.0)
    x.register_hook(lambda grad: grad / (grad - grad))  # HERE
    report = traced(lambda: (x * 2).sum().backward()).report
    assert report.line.text.endswith("# HERE") and "safe_div" in report.instead


def test_second_derivatives():
    def step():
        x = leaf(0.0, 1.0)
        (gradient,) = torch.autograd.grad(x.sin().pow(1.5).sum(), x, create_graph=True)
        gradient.sum().backward()

    report = traced(step).report
    assert report.phase == "backward" and "safe_pow" in report.instead


def test_distributed_data_parallel(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), Inner()))
        report = traced(lambda: model(torch.ones(1, 2)).sum().backward(), model).report
        assert report.module == "module.1 (Inner)" and report.line.text.endswith("# HERE")
        clean = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        assert traced(lambda: clean(torch.ones(1, 2)).sum().backward(), clean).report is None
    finally:
        torch.distributed.destroy_process_group()


def test_what_a_compiled_region_makes_came_in():
    f = torch.compile(lambda x: torch.log(x) * 2, backend="aot_eager")
    f(torch.ones(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Dynamo would warn if it tried to compile the recorder too
        report = traced(lambda: f(torch.zeros(4)) + 1).report
    assert report is not None and report.kind in ("came in", "undefined")


def test_parameters_that_have_no_shape_yet():
    model = torch.nn.Sequential(torch.nn.LazyLinear(2), Inner())
    report = traced(lambda: model(torch.ones(1, 3)).sum().backward(), model).report
    assert report.module == "1 (Inner)" and model[0].weight.shape == (2, 3)


def test_complex_sparse_and_integer_tensors():
    def step():
        z = torch.fft.fft(torch.arange(4.0))
        (z / z.abs().mul(0).to(torch.complex64)).real.sum()
        torch.eye(3).to_sparse() @ torch.ones(3, 3)
        torch.arange(5) // 2

    report = traced(step).report
    assert report.op == "div" and report.output.dtype is torch.complex64


def test_inference_mode_and_nested_tensors():
    def step():
        with torch.inference_mode():
            y = torch.ones(3)
            y.mul_(0)
            torch.log(y)
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    for _ in range(2):
        assert traced(step).report.op == "log"


def test_functorch():
    assert traced(lambda: torch.func.vmap(torch.log)(torch.zeros(3, 2))).report.op == "log"
    gradient = traced(lambda: torch.func.grad(lambda v: (v * 0).sqrt().sum())(torch.ones(3))).report
    assert (gradient.op, gradient.kind) == ("div", "undefined")

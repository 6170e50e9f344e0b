"""One op of each CUDA family, executed on CPU tensors: a sample of test_cuda_executed*.py that takes seconds."""

import pytest
import torch

from tests.kernels.cuda_sources import needs_compilers
from tests.kernels.executed import cuda, machine

FILES = "elementwise/masked_fill", "selection/masked_select", "lists/grad_norm", "images/total_variation"
pytestmark = [needs_compilers, pytest.mark.slow, pytest.mark.xdist_group("cuda_executed_sample")]


@pytest.fixture(scope="module")
def ops():
    return cuda.ops(*(cuda.ROOT / f"csrc/cuda/{name}.cu" for name in FILES))


@pytest.mark.parametrize("x", [torch.randn(4103)[3:], torch.randn(37, 65).t(), torch.randn(7, 64).half()])
def test_elementwise(ops, x):
    mask = torch.rand(x.shape) < 0.4
    assert torch.equal(ops._masked_fill(x, mask, None, -7.0), x.masked_fill(mask, -7.0))


def test_selection(ops):
    x, mask = torch.randn(20_000), torch.rand(20_000) < 0.4
    assert torch.equal(ops._masked_select(x, mask), x[mask])


def test_lists(ops):
    inputs = [torch.randn(5000), torch.randn(3, 7).double(), torch.randn(300, 2)[:, 0]]
    want = torch.cat([x.double().flatten() for x in inputs]).norm()
    for _ in range(2):  # the second finds the counter of the first call reset
        torch.testing.assert_close(ops._grad_norm(inputs, 2), want, rtol=1e-13, atol=0)


def test_images(ops):
    x = torch.randn(1, 2, 20, 24)
    got, _ = ops._total_variation(x, None, 2, True)
    want = x.diff(dim=-1).abs().sum() + x.diff(dim=-2).abs().sum()
    torch.testing.assert_close(got, want)


def test_what_is_no_operand_is_not_touched(ops, monkeypatch):
    """The executor reports a kernel that touches memory outside its operands. To show it, the executor is told of only
    half of a tensor."""
    x, mask = torch.randn(4096), torch.rand(4096) < 0.4
    known = ops.memory

    def half(*arguments):
        ops.operands = [(name, t[: len(t) // 2].clone() if t is x else t) for name, t in ops.operands]
        return known(*arguments)

    monkeypatch.setattr(ops, "memory", half)
    with pytest.raises(machine.Fault, match="reads out of bounds"):
        ops._masked_fill(x, mask, None, 0.0)

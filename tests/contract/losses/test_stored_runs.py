"""CPU kernels read contiguous inputs of losses bound by memory where they are stored. Strided inputs, and inputs of
all other losses, pass through buffers. Both ways must give the same numbers."""

import pytest
import torch

import safeops
from safeops.core.op import registry
from safeops.ops.losses._pointwise import PointwiseLoss
from tests.contract.common import DEVICE, names

pytestmark = pytest.mark.skipif(DEVICE != "cpu" or not registry["mse_loss"].cpu, reason="of the CPU kernels")

LENGTHS = [1025, 1087, 1088, 2048, 33000, 140_001]  # past one chunk, around a block of lanes, several slices


def operands(name, n, dtype, finite=True):
    """Yields contiguous vectors of n elements, at element 1 of their storage. Not finite: with one NaN and one inf."""
    generator = torch.Generator().manual_seed(n)
    for bring in registry[name].domain:
        x = bring(torch.randn(n + 1, generator=generator))
        if not finite:
            x[1 + n // 2], x[n] = float("nan"), float("inf")
        yield x.to(dtype)[1:]


def strided(x):
    return torch.stack((x, x), 1)[:, 0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.slow) if n > 4096 else n for n in LENGTHS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", names(PointwiseLoss))
def test_the_numbers_of_the_buffers(name, dtype, n, masked):
    mask = None
    if masked:
        mask = torch.rand(n + 1, generator=torch.Generator().manual_seed(1))[1:] > 0.3
        mask[n // 2] = mask[-1] = False
    results = []
    for layout in (torch.Tensor.detach, strided):
        leaves = [layout(x).requires_grad_() for x in operands(name, n, dtype, finite=not masked)]
        loss = getattr(safeops, name)(*leaves, mask=mask)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    stored, buffered = results
    assert stored[0].isfinite()
    torch.testing.assert_close(stored[0], buffered[0], rtol=1e-6 if dtype == torch.float32 else 0.01, atol=0)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(stored[1:], buffered[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_order_of_the_additions_is_the_same_for_every_instruction_set(dtype):
    """The sum must use 64 lanes of 16 elements for each chunk of 1024: in fp32, a lane that starts with 2^25 loses the
    ones that follow, and 2^25 + 1 - 2^25 shows how many elements a lane has."""
    x, y = torch.zeros(2048, dtype=dtype), torch.ones(2048, dtype=dtype)
    x[:1024:64] = 1
    x[0], x[1024] = 2**25, -(2**25)
    assert safeops.hinge_embedding_loss(x, y, reduction="sum") == 0
    # Buffers add in another order and give another sum: the assertion above does test the order.
    assert safeops.hinge_embedding_loss(strided(x), y, reduction="sum") > 0


@pytest.mark.parametrize("name", names(PointwiseLoss))
def test_threads_do_not_change_a_bit(name):
    tensors = list(operands(name, 300_000, torch.bfloat16))
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            leaves = [x.detach().requires_grad_() for x in tensors]
            loss = getattr(safeops, name)(*leaves)
            results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@pytest.mark.parametrize("name", names(PointwiseLoss))
def test_one_number_for_all_or_a_gradient_for_each(name):
    """An upstream gradient gives the same bits expanded (read as one number) and full (read through buffers)."""
    tensors = [x.requires_grad_() for x in operands(name, 2000, torch.bfloat16)]
    loss = getattr(safeops, name)(*tensors, reduction="none")
    one = torch.full((), 0.75, dtype=loss.dtype).expand_as(loss)
    for ours, theirs in zip(
        torch.autograd.grad(loss, tensors, one, retain_graph=True), torch.autograd.grad(loss, tensors, one.contiguous())
    ):
        assert torch.equal(ours, theirs)

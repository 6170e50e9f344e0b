"""The ops launch their kernels. The other GPU tests would also pass if plain torch ops ran instead (the composite)."""

import pytest
import torch

from safeops.core.op import registry
from tests.gpu.cases import OPS
from tests.ops import RECORDS


def launches(function):
    """Calls the function. Returns (names of the kernels, names of the memory operations) that it launches."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    names = [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    memory = [name for name in names if name.lower().startswith(("memcpy", "memset"))]
    return [name for name in names if name not in memory], memory


@pytest.mark.parametrize("name", OPS)
def test_kernel_is_registered_and_chosen(name):
    assert registry[name].runs_on("cuda"), f"{name}: CUDA tensors take the composite"


@pytest.mark.parametrize("n", [8, 1_000_003, 16_777_216])
@pytest.mark.parametrize("name", OPS)
def test_launches_per_direction(name, n):
    """Forward and backward each take as many launches as the op's record says."""
    forward, backward = RECORDS[name].launches
    forward = forward(n) if callable(forward) else forward
    case = OPS[name](n, torch.bfloat16, 0)
    leaves = [x.detach().requires_grad_() for x in case.leaves]
    value = case.call(*leaves)
    upstream = torch.ones_like(value)
    torch.autograd.grad(value, leaves, upstream)  # warm up: compiles the kernels and allocates the workspace
    held = []
    kernels, memory = launches(lambda: held.append(case.call(*leaves)))
    assert (len(kernels), len(memory)) == forward, f"forward: {kernels + memory}"
    kernels, memory = launches(lambda: torch.autograd.grad(held[0], leaves, upstream))
    if backward:
        assert (len(kernels), len(memory)) == backward, f"backward: {kernels + memory}"
    elif name != "masked_select":  # masked_select: its backward fills zeros by torch first
        # The backward sorts: one kernel makes the keys, at most 8 passes sort them, and there is a launch of sums for
        # each factor of 16 in the number of summands.
        sums = sum("sum_kernel" in kernel for kernel in kernels)
        assert sum("key_kernel" in kernel for kernel in kernels) == 1 <= sums <= 7, kernels
        assert all("safeops" in kernel or "RadixSort" in kernel for kernel in kernels), kernels
        assert len(kernels) <= sums + 13 and not any("memcpy" in m.lower() for m in memory), kernels + memory

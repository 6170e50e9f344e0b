"""Ops over lists of tensors on a GPU take few launches, and are right on streams, in graphs, without synchronization
and for more than 2^31 elements, with repeatable bits."""

import math

import pytest
import torch

import safeops
from safeops.core.op import registry
from tests.contract.lists.tensor_lists import FLOATS, scans
from tests.gpu.cases import numbers
from tests.gpu.test_execution import LONG
from tests.gpu.test_kernels_are_the_route import launches

NAMES = ("health", "grad_norm", "clip_grad_norm_")


def tensors(count=60, seed=0):
    """Returns tensors of every dtype, of one element to a million."""
    return [numbers(10 ** (i % 7) + i, FLOATS[i % 4], seed + i) for i in range(count)]


def run(name, inputs):
    """Run the op on copies of the inputs. Returns what it returns and what it changes, as one tensor."""
    if name == "health":
        rows = torch.zeros(len(inputs), 8, dtype=torch.int64, device="cuda")
        scans.health_(rows, 0, inputs)
        return rows
    if name == "grad_norm":
        return torch.stack([scans.norm(inputs, ord) for ord in (1, 2, math.inf)])
    copies = [x.clone() for x in inputs]
    scans.scale_(copies, torch.tensor(0.7, device="cuda"))
    return torch.cat([x.double() for x in copies])


@pytest.mark.parametrize("name", NAMES)
def test_the_kernel_is_chosen_and_launched_once_a_list(name):
    assert registry[name].runs_on("cuda")
    flat = [torch.ones(100, device="cuda").half() for _ in range(1025)]
    factor, rows = torch.tensor(0.5, device="cuda"), torch.zeros(1025, 8, dtype=torch.int64, device="cuda")
    calls = {
        "health": lambda n: scans.health_(rows, 0, flat[:n]),
        "grad_norm": lambda n: scans.norm(flat[:n], 2),
        "clip_grad_norm_": lambda n: scans.scale_(flat[:n], factor),
    }
    # (number of tensors, kernels), with a driver of CUDA 12.1 or later.
    for n, scanned in ((1, 1), (97, 1), (1024, 1), (1025, 2)):
        calls[name](n)
        kernels, memory = launches(lambda n=n: calls[name](n))
        assert len(kernels) == scanned and not memory, kernels + memory


@pytest.mark.parametrize("name", NAMES)
def test_the_host_runs_ahead_of_the_device(name):
    inputs = tensors()
    run(name, inputs)
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    factor = torch.tensor(0.7, device="cuda")
    torch.cuda._sleep(LONG)
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = torch.zeros(len(inputs), 8, dtype=torch.int64, device="cuda")
        {"health": lambda: scans.health_(rows, 0, inputs), "grad_norm": lambda: scans.norm(inputs, 2)}.get(
            name, lambda: scans.scale_(inputs, factor)
        )()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert not busy.query(), "the call waited for work queued before it"
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_the_current_stream(name):
    """An op's kernels run on the current stream. Its inputs are written late on a side stream, so a kernel on another
    stream would read the old values."""
    late = tensors(seed=5)
    want = run(name, late)
    inputs = [torch.full_like(x, 7.0) for x in late]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        for x, y in zip(inputs, late):
            x.copy_(y)
        got = run(name, inputs)
    side.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_bitwise_repeatable(name):
    inputs = tensors()
    first = run(name, inputs)
    for _ in range(20):
        assert torch.equal(run(name, inputs), first)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_graph_replays_equal_eager_grad_norm_clip_grad_norm_(nonfinite):
    parameters = [torch.nn.Parameter(x) for x in tensors(20)]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        safeops.clip_grad_norm_(parameters, 1.0, nonfinite=nonfinite)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = safeops.clip_grad_norm_(parameters, 1.0, nonfinite=nonfinite)
    for seed, bad in ((100, 0.0), (200, math.inf), (300, 0.0)):
        fresh = tensors(20, seed)
        fresh[3][0] += bad
        for p, x in zip(parameters, fresh):
            p.grad.copy_(x)
        graph.replay()
        twins = [torch.nn.Parameter(torch.zeros_like(x)) for x in fresh]
        for p, x in zip(twins, fresh):
            p.grad = x
        want = safeops.clip_grad_norm_(twins, 1.0, nonfinite=nonfinite)
        assert torch.equal(static, want)
        for p, q in zip(parameters, twins):
            assert torch.equal(p.grad.nan_to_num(7), q.grad.nan_to_num(7))


@pytest.mark.parametrize("name", NAMES)
def test_more_than_2_31_elements(name):
    """health, grad_norm and clip_grad_norm_ reach every element of a dense tensor and of a strided one."""
    n = 2**31 + 4097
    if torch.cuda.mem_get_info()[0] < 4 * n:
        pytest.skip(f"needs {4 * n / 2**30:.0f} GiB")
    memory = torch.zeros(2 * n if name != "clip_grad_norm_" else n, dtype=torch.float16, device="cuda")
    for x in (memory[:n], memory[::2]) if name != "clip_grad_norm_" else (memory,):
        x[-1] = math.inf if name == "health" else 3.0
        x[0] = 4.0
        if name == "health":
            row = run(name, [x])[0].tolist()
            assert row[:6] == [0, 1, 0, n - 2, 0, 0] and row[7] == 1
        elif name == "grad_norm":
            assert run(name, [x]).tolist() == [7.0, 5.0, 4.0]
        else:
            scans.scale_([x], torch.tensor(0.5, device="cuda"))
            assert x[0] == 2 and x[-1] == 1.5 and not x[1:-1].any()
        x[0] = x[-1] = 0

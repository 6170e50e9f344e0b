"""Ops are right under asynchronous execution: on streams, in graphs, without synchronization, with repeatable bits."""

import pytest
import torch

from tests.gpu.cases import ASYNCHRONOUS, DTYPES, OPS, numbers, same

N = 300_007
LONG = 100_000_000  # clock cycles: tens of milliseconds


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_no_synchronisation(name):
    case = OPS[name](N, torch.float16, 0)
    case.forward_backward()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.forward_backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_host_runs_ahead_of_the_device(name):
    """A call returns while the device is still busy. (torch's debug mode for synchronizations sees only torch's
    own.)"""
    case = OPS[name](N, torch.float16, 0)
    case.forward_backward()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy = torch.cuda.Event()
    busy.record()
    case.forward_backward()
    assert not busy.query(), "the call waited for work queued before it"
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", OPS)
def test_runs_on_the_current_stream(name):
    """An op's kernels run on the current stream. Its inputs are written late on a side stream, so a kernel on another
    stream would read the old values."""
    case = OPS[name](N, torch.float32, 0)
    expected = case.forward_backward()
    late = [x.clone() for x in case.leaves]
    stale = type(case)(case.call, tuple(torch.full_like(x, 7.0) for x in late))
    stale.forward_backward()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        for target, x in zip(stale.leaves, late):
            target.copy_(x)
        got = stale.forward_backward(torch.ones_like(expected[0]))
    side.synchronize()
    same(got, expected)


@pytest.mark.parametrize("name", OPS)
def test_two_streams_at_once_do_not_mix(name):
    """Calls on two streams at once have right results. With shared scratch memory they would add each other's partial
    sums."""
    cases = [OPS[name](N + 1000 * i, torch.float32, 10 * i) for i in range(2)]
    expected = [case.forward_backward() for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    results = [[], []]
    for _ in range(30):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(cases[i].forward_backward())
    torch.cuda.synchronize()
    for i, case_results in enumerate(results):
        for got in case_results:
            same(got, expected[i])


def capture(case):
    """Returns (graph, static value and gradients, upstream gradient) of a captured forward and backward, after the
    warm-up that torch's documentation asks for. The graph reads the upstream gradient, so the caller must keep it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            value, _ = case.forward_backward()
        upstream = torch.ones_like(value)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = case.forward_backward(upstream)
    return graph, static, upstream


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_graph_replays_equal_eager(name, dtype):
    """Replays of two graphs of different sizes, in turn and on changed inputs, equal eager calls: no state passes
    between them."""
    cases = [OPS[name](n, dtype, n % 17) for n in (N, 4096)]
    graphs = [capture(case) for case in cases]
    for seed in range(4):
        for case in cases:
            for i, leaf in enumerate(case.leaves):
                leaf.copy_(numbers(leaf.numel(), dtype, 100 + 10 * seed + i).view_as(leaf))
        expected = [case.forward_backward() for case in cases]
        for graph, *_ in graphs + graphs[::-1]:
            graph.replay()
        torch.cuda.synchronize()
        for (_, static, _), wanted in zip(graphs, expected):
            same(static, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_bitwise_repeatable(name, dtype):
    case = OPS[name](5_000_011, dtype, 3)
    first = case.forward_backward()
    for _ in range(20):
        same(case.forward_backward(), first)


@pytest.mark.parametrize("name", OPS)
def test_the_current_device_is_left_alone(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = OPS[name](1000, torch.float32, 0)
    with torch.cuda.device(1):
        value, _ = case.forward_backward()  # while the current device is 1, the operands are on device 0
        assert torch.cuda.current_device() == 1 and value.device.index == 0

"""to_device has no races on a GPU, where plain non-blocking copies have."""

import pytest
import torch

import safeops
from tests.gpu.test_execution import LONG

N = 1_000_003


def host(pinned):
    x = torch.arange(N, dtype=torch.float32)
    return x.pin_memory() if pinned else x


def behind_a_long_kernel(move, x):
    """Returns the copy on the GPU that `move` makes of x while a long kernel runs. The host overwrites x as soon as the
    call returns."""
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    moved = move(x)
    x.fill_(-1)
    torch.cuda.synchronize()
    return moved.cpu()


def test_the_plain_pattern_has_the_race():
    got = behind_a_long_kernel(lambda x: x.to("cuda", non_blocking=True), host(True))
    assert (got == -1).any(), "no race seen: the test below proves nothing on this machine"


@pytest.mark.parametrize("side", [False, True], ids=["current stream", "side stream"])
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_the_host_buffer_may_be_written_at_once(pinned, side):
    stream = torch.cuda.Stream() if side else None
    for _ in range(3):  # later calls reuse the pinned memory of earlier ones
        got = behind_a_long_kernel(lambda x: safeops.to_device(x, "cuda", stream=stream), host(pinned))
        assert torch.equal(got, host(False))


def test_many_batches_under_way_do_not_mix():
    """Many batches at once arrive unmixed: the pinned memory of a call is reused only after its copy is done."""
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    x, moved = host(True), []
    for i in range(20):
        x.fill_(i)
        moved.append(safeops.to_device(x, "cuda"))
    torch.cuda.synchronize()
    assert all((y == i).all() for i, y in enumerate(moved))


@pytest.mark.parametrize("options", [{}, {"host_reused": False}], ids=str)
def test_the_host_does_not_wait(options):
    x = host(True)
    safeops.to_device([x, x[1:]], "cuda", **options)  # the first call allocates the pinned memory
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy = torch.cuda.Event()
    busy.record()
    safeops.to_device([x, x[1:]], "cuda", **options)
    assert not busy.query(), "the call waited for work queued before it"
    torch.cuda.synchronize()


def freed_while_read(move):
    """Returns (a batch that a kernel reads late though it is freed at once, True if a new tensor of the side stream got
    its memory)."""
    side, x = torch.cuda.Stream(), host(True)
    moved = move(x, side)
    torch.cuda.synchronize()
    place = moved.data_ptr()
    torch.cuda._sleep(LONG)
    read = moved * 1
    del moved
    with torch.cuda.stream(side):
        others = [torch.full((N,), -1.0, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    return read.cpu(), place in [other.data_ptr() for other in others]


def plain_side_copy(x, side):
    with torch.cuda.stream(side):
        y = x.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    return y


def test_the_plain_side_stream_pattern_frees_what_is_read():
    got, handed_out = freed_while_read(plain_side_copy)
    assert handed_out and (got == -1).any(), "no race seen: the test below proves nothing on this machine"


def test_memory_that_another_stream_reads_is_not_handed_out():
    got, handed_out = freed_while_read(lambda x, side: safeops.to_device(x, "cuda", stream=side))
    assert torch.equal(got, host(False)) and not handed_out


def test_the_current_stream_waits_for_a_side_stream():
    side, x = torch.cuda.Stream(), host(True)
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
    got = safeops.to_device(x, "cuda", stream=side) + 0
    torch.cuda.synchronize()
    assert torch.equal(got.cpu(), host(False))


def test_other_directions():
    x = torch.arange(6.0).reshape(2, 3).t()
    there = safeops.to_device({"x": x, "n": 3}, "cuda")
    assert there["x"].device == torch.device("cuda", torch.cuda.current_device()) and there["x"].stride() == x.stride()
    assert safeops.to_device(there, "cuda") is there
    torch.cuda._sleep(LONG)
    there["x"].add_(1)
    assert torch.equal(safeops.to_device(there, "cpu")["x"], x + 1)  # the copy to the CPU waited for add_
    leaf = torch.ones(3, requires_grad=True)
    (safeops.to_device(leaf, "cuda") * 2).sum().backward()
    assert leaf.grad.tolist() == [2.0] * 3

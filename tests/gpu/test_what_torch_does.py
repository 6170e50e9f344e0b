"""The claims of docs/what-really-happens.md about torch on CUDA hold. A failure here is no fault of safeops."""

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu
N = 1 << 22
LONG = 100_000_000  # clock cycles: tens of milliseconds


@pytest.mark.parametrize("hop", ["boolean index", "nonzero", "item", "cpu"])
def test_it_waits_for_the_device(hop):
    x = torch.ones(8, device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            if hop == "boolean index":
                x[x > 0]
            elif hop == "nonzero":
                x.nonzero()
            elif hop == "item":
                x.sum().item()
            else:
                x.cpu()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_a_boolean_write_in_half_is_exact():
    w = torch.tensor([1.0, 2.0, 3.0], device="cuda", requires_grad=True)
    error = w.half() * 2 - 1
    error[error > 4] = 0
    error.sum().backward()
    assert error.tolist() == [1, 3, 0] and w.grad.tolist() == [2, 2, 0]
    kept = w.half().relu()
    kept[kept > 2] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_autocast_sums_in_fp32_and_divides_in_half():
    x = torch.full((70_000,), 2.0, device="cuda", dtype=torch.float16)
    with torch.autocast("cuda", dtype=torch.float16):
        assert x.sum().dtype == torch.float32 and x.sum().item() == 140_000
        assert (x / (x * 0 + 1e-8)).isinf().all()
        assert (1 / x).dtype == torch.float32  # torch computes 1 / x as x.reciprocal()
        assert x.clamp(min=1e-8).dtype == torch.float16 and x.log().dtype == torch.float32
    assert x.sum().isinf()


def test_an_index_out_of_range_ends_the_context():
    """An index out of range ends the CUDA context: each later call fails. So the test runs in a process of its own."""
    program = (
        "import torch\n"
        "x = torch.arange(3, device='cuda')\n"
        "y = x[torch.tensor([0, 3], device='cuda')]\n"
        "print('the call itself returns')\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        torch.cuda.synchronize()\n"
        "        (x + 1).cpu()\n"
        "    except RuntimeError as error:\n"
        "        print('device-side assert' in str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["the call itself returns", "True", "True"], done.stderr[-2000:]


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_another_stream_still_reads(recorded):
    """Without record_stream the allocator reuses a tensor's block while a queued copy still reads it; with
    record_stream it does not."""
    torch.cuda.empty_cache()
    side, copy = torch.cuda.Stream(), torch.empty(N, device="cuda")
    x = torch.ones(N, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        copy.copy_(x)
    if recorded:
        x.record_stream(side)
    place = x.data_ptr()
    del x
    reused = torch.full((N,), 7.0, device="cuda")
    torch.cuda.synchronize()
    assert (reused.data_ptr() == place) is not recorded
    assert copy.unique().tolist() == [1.0 if recorded else 7.0]


def test_an_asynchronous_copy_to_the_host_is_not_there_yet():
    x = torch.ones(N, device="cuda")
    host = torch.zeros(N, pin_memory=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    host.copy_(x, non_blocking=True)
    assert host.numpy()[-1] == 0  # 0: the host has read it before the copy was done
    torch.cuda.synchronize()
    assert host.numpy()[-1] == 1

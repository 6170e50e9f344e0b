"""A failed allocation raises the error that torch's ops raise for as many bytes, and prints nothing."""

import pytest
import torch

import safeops
from safeops.core import library
from safeops.core.op import registry
from tests.contract.common import DEVICE

HUGE = 2**45  # elements of an expanded tensor, whose storage has one


def one(value, dtype=None):
    return torch.tensor(value, dtype=dtype, device=DEVICE)


def raised(call):
    with pytest.raises(RuntimeError) as caught:
        call()
    return caught.value


def described(error):
    """Returns the error's class and its text without digits. (On a GPU its first sentence: others list processes.)"""
    words = str(error) if DEVICE == "cpu" else str(error).partition(".")[0]
    return type(error), "".join(c for c in words if not c.isdigit())


INDEX, KEEP = one(0), one(True)
CALLS = {
    "elementwise": lambda x: safeops.safe_log(x),
    "two operands": lambda x: safeops.safe_div(x[:, None].expand(HUGE, 2).t(), x),
    "filled": lambda x: safeops.masked_fill(x, KEEP, 1.0),
    "losses": lambda x: safeops.mse_loss(x, x.detach(), reduction="none"),
    "sums": lambda x: safeops.masked_sum(x.unsqueeze(1), dim=1),
    "extremes": lambda x: safeops.masked_amax(x.unsqueeze(1), dim=1),
    "rows": lambda x: safeops.masked_softmax(x.view(2**25, 2**20)),
    "a number of each row": lambda x: safeops.cosine_similarity(x.unsqueeze(1), x.detach().unsqueeze(1), dim=-1),
    "picked": lambda x: safeops.safe_gather(x, 0, INDEX.expand(HUGE)),
    "packed": lambda x: safeops.masked_compact(x[:3], KEEP.expand(3), capacity=HUGE),
    "backward": lambda x: safeops.safe_gather(x.requires_grad_(), 0, INDEX.expand(3)).sum().backward(),
}

if DEVICE == "cpu":  # the GPU kernel refuses so many images
    CALLS["images"] = lambda x: safeops.total_variation(x[:, None, None, None].expand(-1, 1, 2, 2), reduction="none")


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_result_for_which_there_is_no_memory(name, recorded, capfd):
    x = one(1.0).requires_grad_(recorded).expand(HUGE)
    expected = raised(lambda: torch.empty(HUGE, device=DEVICE))
    error = raised(lambda: CALLS[name](x))
    assert described(error) == described(expected)
    assert error.__suppress_context__, "what the extension has said of it is in the traceback"
    assert capfd.readouterr() == ("", "")


REFUSED = RuntimeError("safeops: no memory for 64 bytes on cuda:1\nException raised from ...")  # the extension's error


@pytest.mark.parametrize("recorded", [False, True])
def test_a_gpu_without_memory(recorded, monkeypatch):
    """After the extension's error, torch's allocator is asked for the same bytes on that GPU; its error is raised."""
    asked, op = [], registry["masked_sum"]

    def refuse(*operands):
        raise REFUSED

    def empty(count, *, dtype, device):
        asked.append((count, dtype, str(device)))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(op, "eager", [(refuse, False), (refuse, False)])
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory.$"):
        safeops.masked_sum(torch.ones(3, requires_grad=recorded))
    assert asked == [(64, torch.uint8, "cuda:1")]


def test_a_gpu_that_has_memory_by_now(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *_, **options: None)
    with pytest.raises(torch.OutOfMemoryError, match="^safeops: no memory for 64 bytes on cuda:1$"):
        library.raise_cause(REFUSED)

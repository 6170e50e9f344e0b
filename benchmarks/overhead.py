"""What a public call costs over a bare aten op: 8 elements, so that nothing but the call is measured."""

import statistics
from functools import partial

import torch

import safeops

from .timing import interleave


def calls(device):
    y = torch.randn(8, device=device)
    mask = torch.rand(8, device=device) < 0.75
    # op -> (ours, the bare aten op)
    return {
        "masked_fill": (lambda x: safeops.masked_fill(x, mask, 0.0), lambda x: torch.masked_fill(x, mask, 0.0)),
        "safe_div": (lambda x: safeops.safe_div(x, y), lambda x: torch.div(x, y)),
        "masked_sum": (lambda x: safeops.masked_sum(x, mask), lambda x: torch.sum(x)),
        "masked_mean": (lambda x: safeops.masked_mean(x, mask), lambda x: torch.mean(x)),
        "mse_loss": (lambda x: safeops.mse_loss(x, y, mask=mask), lambda x: torch._C._nn.mse_loss(x, y)),
        "l1_loss": (lambda x: safeops.l1_loss(x, y, mask=mask), lambda x: torch._C._nn.l1_loss(x, y)),
        "smooth_l1_loss": (
            lambda x: safeops.smooth_l1_loss(x, y, mask=mask),
            lambda x: torch._C._nn.smooth_l1_loss(x, y),
        ),
        "huber_loss": (lambda x: safeops.huber_loss(x, y, mask=mask), lambda x: torch._C._nn.huber_loss(x, y)),
    }


def measure(op: str, device: str, rounds: int) -> list[dict]:
    """Microseconds a call, without and with a gradient to record."""
    table = calls(device)
    if op not in table:
        return []
    ours, bare = table[op]
    records = []
    for grad in (False, True):
        x = torch.randn(8, device=device, requires_grad=grad)
        samples = interleave({"ours": partial(ours, x), "bare": partial(bare, x)}, rounds, "cpu")  # the host's time
        extra = statistics.median(a - b for a, b in zip(samples["ours"], samples["bare"], strict=True))
        micro = {name: statistics.median(times) * 1e6 for name, times in samples.items()}
        records.append(
            {"op": op, "grad": grad, "ours_us": micro["ours"], "aten_us": micro["bare"], "over_us": extra * 1e6}
        )
        if device == "cuda":
            torch.cuda.synchronize()
    return records

"""What a public call costs over a bare aten op: 8 elements, so that nothing but the call is measured."""

from functools import partial

import torch

import safeops

from .timing import interleave


def calls(device):
    y = torch.randn(8, device=device)
    mask = torch.rand(8, device=device) < 0.75
    index = torch.randint(8, (8,), device=device)
    # op -> (ours, the bare aten op)
    return {
        "masked_fill": (lambda x: safeops.masked_fill(x, mask, 0.0), lambda x: torch.masked_fill(x, mask, 0.0)),
        "safe_div": (lambda x: safeops.safe_div(x, y), lambda x: torch.div(x, y)),
        "safe_reciprocal": (lambda x: safeops.safe_reciprocal(x), lambda x: torch.reciprocal(x)),
        "safe_log": (lambda x: safeops.safe_log(x), lambda x: torch.log(x)),
        "safe_sqrt": (lambda x: safeops.safe_sqrt(x), lambda x: torch.sqrt(x)),
        "safe_rsqrt": (lambda x: safeops.safe_rsqrt(x), lambda x: torch.rsqrt(x)),
        "safe_exp": (lambda x: safeops.safe_exp(x), lambda x: torch.exp(x)),
        "safe_acos": (lambda x: safeops.safe_acos(x), lambda x: torch.acos(x)),
        "safe_asin": (lambda x: safeops.safe_asin(x), lambda x: torch.asin(x)),
        "safe_pow": (lambda x: safeops.safe_pow(x, y), lambda x: torch.pow(x, y)),
        "safe_pow_number": (lambda x: safeops.safe_pow(x, 1.5), lambda x: torch.pow(x, 1.5)),
        "safe_atan2": (lambda x: safeops.safe_atan2(x, y), lambda x: torch.atan2(x, y)),
        "xlogy": (lambda x: safeops.xlogy(x, y), lambda x: torch.xlogy(x, y)),
        "masked_compact_50": (lambda x: safeops.masked_compact(x, mask, capacity=8), lambda x: x[mask]),
        "masked_select": (lambda x: safeops.masked_select(x, mask), lambda x: torch.masked_select(x, mask)),
        "masked_scatter": (
            lambda x: safeops.masked_scatter(x, mask, y),
            lambda x: torch.masked_scatter(x, mask, y),
        ),
        "safe_gather": (lambda x: safeops.safe_gather(x, 0, index), lambda x: torch.gather(x, 0, index)),
        "safe_index_select": (
            lambda x: safeops.safe_index_select(x, 0, index),
            lambda x: torch.index_select(x, 0, index),
        ),
        "masked_sum": (lambda x: safeops.masked_sum(x, mask), lambda x: torch.sum(x)),
        "masked_mean": (lambda x: safeops.masked_mean(x, mask), lambda x: torch.mean(x)),
        "masked_var": (lambda x: safeops.masked_var(x, mask), lambda x: torch.var(x)),
        "masked_std": (lambda x: safeops.masked_std(x, mask), lambda x: torch.std(x)),
        "masked_amax": (lambda x: safeops.masked_amax(x, mask), lambda x: torch.amax(x)),
        "masked_amin": (lambda x: safeops.masked_amin(x, mask), lambda x: torch.amin(x)),
        "masked_norm": (lambda x: safeops.masked_norm(x, mask), lambda x: torch.linalg.vector_norm(x)),
        "masked_sum_of_squares": (lambda x: safeops.masked_sum_of_squares(x, mask), lambda x: torch.sum(x)),
        "masked_rms": (lambda x: safeops.masked_rms(x, mask), lambda x: torch.linalg.vector_norm(x)),
        "masked_logsumexp": (lambda x: safeops.masked_logsumexp(x, mask), lambda x: torch.logsumexp(x, 0)),
        "masked_softmax": (lambda x: safeops.masked_softmax(x, mask), lambda x: torch.softmax(x, -1)),
        "masked_log_softmax": (lambda x: safeops.masked_log_softmax(x, mask), lambda x: torch.log_softmax(x, -1)),
        "normalize": (lambda x: safeops.normalize(x), lambda x: torch.softmax(x, -1)),
        "cosine_similarity": (lambda x: safeops.cosine_similarity(x, y), lambda x: torch.cosine_similarity(x, y, -1)),
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
        contenders = {"ours": partial(ours, x), "bare": partial(bare, x)}
        samples = interleave(contenders, rounds, "cpu", cold=False)  # on CUDA too it is the host's time that counts
        # the best of many: a call this short is either left alone or interrupted, and only the former is its cost
        ours_us, aten_us = (samples[name].best() * 1e6 for name in ("ours", "bare"))
        record = {"op": op, "grad": grad, "ours_us": ours_us, "aten_us": aten_us, "over_us": ours_us - aten_us}
        records.append(record)
        if device == "cuda":
            torch.cuda.synchronize()
    return records

"""Interleaved timing. The machine may be shared and noisy, so contenders take turns within each round, and what is
compared is the median over the rounds of the ratio within a round: whatever slows a round, slows all of it."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time

import torch

SHORTEST = 2e-3  # seconds a CPU sample lasts at least; shorter calls are repeated within it
FLUSH_BYTES = 1 << 30  # CUDA: written before each sample. Empties the L2 cache, and hides the launch of what follows


def steady_memory():
    """Have malloc keep freed memory, as CUDA's caching allocator does. Else a fresh 32 MiB output costs its page
    faults at every call, three times the copy itself, in ours, in eager and in torch.compile alike."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    m_trim_threshold, m_mmap_max = -1, -4
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)


def copy_of(total_bytes: int, device: str):
    """The floor: a copy that moves as many bytes, half read and half written."""
    n = max(total_bytes // 2 // 4, 1)
    source, destination = torch.zeros(n, device=device), torch.zeros(n, device=device)
    return lambda: destination.copy_(source)


def interleave(contenders: dict, rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds per call of each contender, one sample a round."""
    sample = _cuda_sampler() if device == "cuda" else _cpu_sample
    repeats = {}
    for name, call in contenders.items():
        call()  # compiles, allocates, warms
        repeats[name] = 1 if device == "cuda" else max(1, int(SHORTEST / max(_cpu_sample(call, 1), 1e-7)))
    samples = {name: [] for name in contenders}
    order = list(contenders)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in order:
                samples[name].append(sample(contenders[name], repeats[name]))
            order = order[1:] + order[:1]  # nobody always follows the same neighbour
    finally:
        gc.enable()
    return samples


def ratio(samples: dict, numerator: str, denominator: str) -> float:
    return statistics.median(a / b for a, b in zip(samples[numerator], samples[denominator], strict=True))


def _cpu_sample(call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _cuda_sampler():
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(call, repeats):
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return sample

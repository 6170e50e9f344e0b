"""Times contenders in turns, on a machine that may be shared. A sample is disturbed if a thread of this process was
ready to run but had no core, or on CUDA if the GPU waited for the host (cuda_timing). Medians of undisturbed samples
are compared. (Disturbed samples would make two short calls look equal: both last one time slice of the scheduler.)"""

from __future__ import annotations

import ctypes
import functools
import gc
import statistics
import time
from pathlib import Path

import torch

from .cuda_timing import CudaSampler, Sample

SHORTEST = 2e-3  # least seconds of a warm CPU sample: shorter calls are repeated within it
DISTURBED = 0.03  # a sample is disturbed if our threads wait for a core for more than this share of it
PATIENCE = 6.0  # seconds after which a comparison ends without enough undisturbed samples
# Bytes that are written before each cold sample, so that all contenders start with empty caches, as in a training step.
# Otherwise a copy whose buffers half fit into the cache would be a floor at twice the memory's speed.
FLUSH_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}


def steady_memory():
    """Make malloc keep freed memory, as CUDA's caching allocator does. Otherwise page faults in its output would cost
    each contender's call three times the time of the copy, for 32 MiB."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    m_trim_threshold, m_mmap_max = -1, -4
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)


def copy_of(total_bytes: int, device: str):
    """Returns the floor: a function that copies, and so moves `total_bytes`, half of them read and half written."""
    n = max(total_bytes // 2 // 4, 1)
    source, destination = torch.zeros(n, device=device), torch.zeros(n, device=device)
    return lambda: destination.copy_(source)


class Samples:
    """The samples of one contender: seconds per call, the host's seconds (None on a CPU), True if undisturbed."""

    def __init__(self):
        self.seconds, self.hosts, self.clean, self.calm = [], [], [], 0

    def add(self, *sample):
        taken = Sample(*sample)
        self.seconds.append(taken.seconds)
        self.hosts.append(taken.host)
        self.calm += taken.waited < DISTURBED
        self.clean.append(taken.waited < DISTURBED and taken.full)

    def time(self) -> float:
        clean = [seconds for seconds, ok in zip(self.seconds, self.clean, strict=True) if ok]
        return statistics.median(clean) if len(clean) >= 3 else min(self.seconds)

    def best(self) -> float:
        return min(self.seconds)

    def host(self) -> float | None:
        """Returns the host's seconds to enqueue a call, of the best sample, which was not interrupted; None on a
        CPU."""
        return None if None in self.hosts else min(self.hosts)

    def share_clean(self) -> float:
        return sum(self.clean) / len(self.clean)


def interleave(contenders: dict, rounds: int, device: str, *, cold: bool = True) -> dict[str, Samples]:
    """Takes `rounds` undisturbed samples of each contender in turns, or as many as it gets in PATIENCE seconds. cold:
    empty the caches before each sample."""
    samplers = {name: sampler(call, device, cold=cold) for name, call in contenders.items()}
    gc.collect()
    gc.disable()
    try:
        return alternate(samplers, rounds)
    finally:
        gc.enable()


def sampler(call, device: str, *, cold: bool = True):
    """Returns a function that takes one Sample of `call`."""
    call()  # compiles, allocates, warms the caches
    if not cold:
        repeats = max(1, int(SHORTEST / max(_cpu_sample(call, 1).seconds, 1e-7)))
        return lambda: _cpu_sample(call, repeats)
    flush = _flush_buffer(device).zero_
    if device == "cuda":
        return CudaSampler(call, flush)

    def take():
        flush()
        return _cpu_sample(call, 1)

    return take


@functools.cache
def _flush_buffer(device: str) -> torch.Tensor:
    return torch.empty(FLUSH_BYTES[device], dtype=torch.int8, device=device)


def alternate(samplers: dict, rounds: int) -> dict[str, Samples]:
    """Takes samples from the samplers in turns, until each has `rounds` undisturbed samples or PATIENCE seconds have
    passed."""
    samples = {name: Samples() for name in samplers}
    order = list(samplers)
    passes, deadline = 0, time.perf_counter() + PATIENCE
    while order and (passes < rounds or time.perf_counter() < deadline):
        for name in order:
            samples[name].add(*samplers[name]())
        passes += 1
        # `calm` counts a sample as undisturbed even if it emptied the GPU's queue: the call will do so each time.
        order = [name for name in order[1:] + order[:1] if samples[name].calm < rounds]
    return samples


def _waited() -> float:
    """Returns the seconds that this process's threads were ready to run but had no core; 0 if the system has no
    counter."""
    total = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[1])
        except (OSError, IndexError):  # a thread that has just ended
            continue
    return total / 1e9


def _cpu_sample(call, repeats: int) -> Sample:
    waited = _waited()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    elapsed = time.perf_counter() - start
    return Sample(elapsed / repeats, (_waited() - waited) / elapsed)

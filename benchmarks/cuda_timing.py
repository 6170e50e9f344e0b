"""The two times of a call on CUDA: what the GPU takes, and what the host takes to enqueue it.

Events around a call tell the GPU's time only if its queue never runs dry between them; otherwise the GPU waits for the
host there, and what they tell is the host's time. So a spin kernel goes ahead of them, for longer than the host takes.
The start event says afterwards whether it was long enough: if the GPU had come to it before the host was done, the
sample is taken again behind a longer spin. The host is timed in the same sample, so with the queue full and without a
synchronisation. A call that waits for the GPU itself, as `x[mask]` does, always finds the queue dry: its time holds the
host's, and its samples say so. (So do calls of more launches than the queue holds, about a thousand.)
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

SHORTEST, LONGEST = 5e-4, 0.1  # seconds of the spin kernel
MARGIN = 4  # times the host's last time: it varies
CYCLES = 2e9  # of the GPU's clock in a second, at the most; at a slower clock the spin is longer


class Sample(NamedTuple):
    seconds: float  # of one call; on CUDA those of the GPU
    waited: float = 0.0  # share of the time that threads of ours stood ready without a core
    host: float | None = None  # seconds to enqueue the call; None on a CPU
    full: bool = True  # whether the GPU's queue was full all the while


class CudaSampler:
    """Takes one sample of `call` at a time, each from empty caches."""

    def __init__(self, call, flush):
        self.call, self.flush, self.spin = call, flush, SHORTEST

    def __call__(self) -> Sample:
        while not (taken := self.behind(self.spin)).full and self.spin:
            self.spin = 0.0 if self.spin == LONGEST else min(max(2 * self.spin, MARGIN * taken.host), LONGEST)
        if self.spin:
            self.spin = min(max(SHORTEST, MARGIN * taken.host), LONGEST)
        return taken

    def behind(self, spin: float) -> Sample:
        """One sample behind a spin of so many seconds; 0: on a GPU that has nothing to do."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush()
        if spin:
            torch.cuda._sleep(int(spin * CYCLES))
        else:
            torch.cuda.synchronize()
        start.record()
        begin = time.perf_counter()
        self.call()
        host = time.perf_counter() - begin
        end.record()
        full = not start.query()
        end.synchronize()
        return Sample(start.elapsed_time(end) / 1e3, host=host, full=full)

"""Measures two times of a call on CUDA: the GPU's, and the host's time to enqueue the call.

Events around a call give the GPU's time only if the GPU's queue never runs empty between them; otherwise the GPU waits
for the host, and the events include the host's time. So a spin kernel runs before the start event, for longer than the
host needs. If the GPU has reached the start event before the host is done, the spin was too short, and the sample is
taken again behind a longer spin. The host is timed in the same sample: with the queue full, without a synchronisation.
A call that itself waits for the GPU, as `x[mask]` does, always empties the queue: its time includes the host's, and its
samples are marked (full=False). So are calls of more launches than the queue holds, about a thousand.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

SHORTEST, LONGEST = 5e-4, 0.1  # seconds of the spin kernel
MARGIN = 4  # the spin lasts 4 times as long as the host last took, since that varies
CYCLES = 2e9  # most clock cycles per second of a GPU; at a slower clock the spin lasts longer


class Sample(NamedTuple):
    seconds: float  # per call; on CUDA the GPU's time
    waited: float = 0.0  # share of the time in which this process's threads were ready to run but had no core
    host: float | None = None  # seconds to enqueue the call; None on a CPU
    full: bool = True  # False: the GPU's queue ran empty, and the time includes the host's


class CudaSampler:
    """Takes one sample of `call` at a time, each with empty caches."""

    def __init__(self, call, flush):
        self.call, self.flush, self.spin = call, flush, SHORTEST

    def __call__(self) -> Sample:
        while not (taken := self.behind(self.spin)).full and self.spin:
            self.spin = 0.0 if self.spin == LONGEST else min(max(2 * self.spin, MARGIN * taken.host), LONGEST)
        if self.spin:
            self.spin = min(max(SHORTEST, MARGIN * taken.host), LONGEST)
        return taken

    def behind(self, spin: float) -> Sample:
        """Takes one sample after a spin kernel of `spin` seconds. 0: no spin; the GPU is idle when the call begins."""
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

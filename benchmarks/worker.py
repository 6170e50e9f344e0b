"""The worker of `--compare`, which runs in a process for each of the two checkouts: on request it takes samples of its
checkout's safeops."""

import gc
from functools import partial
from pathlib import Path

import torch

import safeops

from . import overhead, speed, timing
from .case import DTYPES, build, names


class Worker:
    def __init__(self):
        names()  # registers all cases
        self.samplers = {}

    def start(self, device, threads, fresh_memory):
        torch.set_num_threads(threads)
        if device == "cpu" and not fresh_memory:
            timing.steady_memory()
        gc.disable()
        folder = Path(safeops.__file__).parent
        return {"checkout": str(folder.parent), "built": any(folder.glob("_C.*so"))}

    def case(self, name, n, dtype, device):
        """Builds the samplers of a case, one for each direction. Returns the directions' names."""
        self.samplers = {}
        gc.collect()
        benchmark = build(name, n, DTYPES[dtype], device)
        calls = speed.calls(benchmark.ours, benchmark.inputs, benchmark.backward_bytes is not None)
        self.samplers = {direction: timing.sampler(call, device) for direction, call in calls.items()}
        return list(self.samplers)

    def small(self, name, device):
        """Builds the samplers of a case's small calls. Returns the names of their kinds; a case may have none."""
        self.samplers = {}
        for key, grad in (("no grad", False), ("with grad", True)):
            if result := overhead.small(name, device, grad):
                case, inputs = result
                self.samplers[key] = timing.sampler(partial(case.ours, *inputs), "cpu", cold=False)
        return list(self.samplers)

    def sample(self, key):
        return self.samplers[key]()

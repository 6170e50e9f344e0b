"""One of the two processes of `--compare`: it has imported the safeops of its own checkout, and takes the samples that
it is asked for. A request and its answer are a line of JSON each."""

import gc
import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

import safeops

from . import overhead, speed, timing
from .case import DTYPES, build, names


class Worker:
    def __init__(self):
        names()  # the families register their cases
        self.samplers = {}

    def start(self, device, threads, fresh_memory):
        torch.set_num_threads(threads)
        if device == "cpu" and not fresh_memory:
            timing.steady_memory()
        gc.disable()
        folder = Path(safeops.__file__).parent
        return {"checkout": str(folder.parent), "built": any(folder.glob("_C.*so"))}

    def case(self, name, n, dtype, device):
        """The directions that there are."""
        self.samplers = {}
        gc.collect()
        made = build(name, n, DTYPES[dtype], device)
        calls = speed.calls(made.ours, made.inputs, made.backward_bytes is not None)
        self.samplers = {direction: timing.sampler(call, device) for direction, call in calls.items()}
        return list(self.samplers)

    def small(self, name, device):
        """The kinds of small call that there are: a name may have none."""
        self.samplers = {}
        for key, grad in (("no grad", False), ("with grad", True)):
            if found := overhead.small(name, device, grad):
                case, inputs = found
                self.samplers[key] = timing.sampler(partial(case.ours, *inputs), "cpu", cold=False)
        return list(self.samplers)

    def sample(self, key):
        return self.samplers[key]()


def serve():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    worker = Worker()
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = {"ok": getattr(worker, what)(*arguments)}
        except Exception as error:  # an op, or an argument, that this checkout does not have
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)

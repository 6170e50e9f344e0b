"""The worker, which prepares contenders and times contests. Workers prepare in parallel, since that is mostly
compiling; only one worker times at a time."""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import sys

import torch

from .. import memory, timing
from ..served import serve
from . import agreement, contest
from .contest import OURS, Absent

LONG = 1e12  # a contest with more arithmetic operations is timed in only three rounds
# These methods time configurations to choose one. Only one process may do so at a time, or they disturb each other.
CHOOSERS = (
    ("torch._inductor.runtime.triton_heuristics", "CachingAutotuner", "autotune_to_one_config"),
    ("triton.runtime.autotuner", "Autotuner", "_bench"),
)


class Worker:
    """Holds the loaded and compiled functions of contenders on one device."""

    def start(self, device: str, small: bool, compiling: bool, lock: str | None = None):
        """small: time small operands. compiling: torch.compile takes part. lock: path of the workers' lock file."""
        contest.names()
        self.device, self.small, self.compiling = device, small, compiling
        self.functions = {}
        if compiling:
            torch._dynamo.config.recompile_limit = 256  # many contests compile the same function of their family
        for chooser in CHOOSERS if lock else ():
            one_at_a_time(*chooser, lock)

    def prepare(self, name, who):
        """Measure a contender's errors and compile it. Returns {"absent": why it cannot run}; or {"other": Rival.other,
        "errors": unless `other` is set, "value": the mean magnitude of the result}."""
        rival = contest.build(name, "cpu", small=True).contenders()[who]
        if rival.cuda and self.device != "cuda":
            return {"absent": "runs on CUDA alone"}
        if rival.compiled and not self.compiling:
            return {"absent": "torch.compile is left out"}
        try:
            return self.prepared(name, who, rival.other)
        except Absent as error:
            return {"absent": str(error)}
        finally:
            self.settle()

    def prepared(self, name, who, other):
        result = {"other": other} | ({} if other else {"errors": agreement.errors(name, who, self.device)})
        forward, total = self.calls(name, who, contest.build(name, self.device, self.small))
        result["value"] = forward().abs().mean(dtype=torch.float64).item()
        if total:
            total()
        return result

    def time(self, name, whos, rounds):
        """Times the contenders named in `whos`. Returns a record for each direction."""
        entry = contest.build(name, self.device, self.small)
        calls = {
            who: self.calls(name, who, contest.build(name, self.device, self.small) if it.overwrites else entry)
            for who, it in entry.contenders().items()
            if who in whos
        }
        if entry.flops and entry.flops[0] > LONG:
            rounds = min(rounds, 3)
        records = []
        for place, direction in enumerate(("forward", "total")):
            timed = {who: pair[place] for who, pair in calls.items() if pair[place]}
            if OURS in timed:
                records.append(self.record(entry, direction, place, timed, rounds) | {"contest": name})
        del entry, calls, timed
        timing._flush_buffer.cache_clear()
        self.settle()
        return records

    def record(self, entry, direction, place, calls, rounds):
        floor = {"copy": timing.copy_of(round(entry.bytes[place]), self.device)} if entry.bytes else {}
        samples = timing.interleave(floor | calls, rounds, self.device, cold=not self.small)
        results = {"direction": direction, "sizes": entry.sizes()}
        results |= {"bytes": entry.bytes and entry.bytes[place], "flops": entry.flops and entry.flops[place]}
        results["milliseconds"] = {who: taken.time() * 1e3 for who, taken in samples.items()}
        results["undisturbed"] = {who: taken.share_clean() for who, taken in samples.items()}
        if self.device == "cuda":
            results["host_us"] = {who: taken.host() * 1e6 for who, taken in samples.items()}
            results["peak"] = {who: memory.peak_extra(call, self.device)[0] for who, call in calls.items()}
        return results

    def calls(self, name, who, entry):
        """Returns (function that runs forward without gradients, function that runs forward and backward, or None)."""
        rival = entry.contenders()[who]
        if (name, who) not in self.functions:
            function = rival.load()
            self.functions[name, who] = torch.compile(function, dynamic=False) if rival.compiled else function
        function = self.functions[name, who]
        detached = [x.detach() for x in entry.inputs]
        inputs = [x.detach().requires_grad_() for x in entry.inputs]

        def forward():
            with torch.no_grad():
                return function(*detached, *entry.rest)

        upstream = []

        def total():
            out = function(*inputs, *entry.rest)
            if not upstream:
                upstream.append(torch.randn_like(out))
            return torch.autograd.grad(out, inputs, upstream[0], allow_unused=True)

        return forward, total if rival.backward and entry.backward else None

    def settle(self):
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def one_at_a_time(module, owner, method, lock):
    """Make a method wait for a lock that all workers share. If the library's version lacks the method, print that and
    go on: the workers may then disturb each other."""
    try:
        owner = getattr(importlib.import_module(module), owner)
        original = getattr(owner, method)
    except (ImportError, AttributeError) as error:
        print(f"rivals: {method} of {module} is not there to be locked: {error}", file=sys.stderr)
        return

    def locked(*args, **options):
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return original(*args, **options)

    setattr(owner, method, locked)


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # there are as many workers as cores
    serve(Worker(), sys.stdin)

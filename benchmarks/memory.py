"""Measures a call's peak extra memory, forward and backward. The goal is the size of its output, and no more."""

import torch

from .case import Case
from .speed import calls

SLACK = 1 << 20  # bytes allowed in addition to the output: partial results of each block, counters


def peak_extra(call, device: str) -> tuple[int, int]:
    """Returns (the most bytes that the call had allocated at any time, the bytes of the tensors that it returned)."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, _size(result)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    # each allocation (positive) and release (negative) by torch's allocator
    steps = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = peak = 0
    for step in sorted(steps, key=lambda e: e.start_ns()):
        level += step.nbytes()
        peak = max(peak, level)
    return peak, _size(result)


def _size(result) -> int:
    tensors = [result] if isinstance(result, torch.Tensor) else result
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(case: Case, dtype: str, device: str) -> list[dict]:
    name, pattern = next(iter(case.eager.items()))
    backward = case.backward_bytes is not None
    ours, eager = (calls(function, case.inputs, backward) for function in (case.ours, pattern))
    records = []
    for direction in ours:
        record = {"op": case.op, "dtype": dtype, "direction": direction, "elements": case.elements}
        for who, call in (("ours", ours[direction]), ("eager", eager[direction])):
            call()
            record[f"{who}_peak"], record["output"] = peak_extra(call, device)
        record["eager_pattern"] = name
        records.append(record)
    return records

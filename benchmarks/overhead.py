"""Measures how much longer a public call takes than a bare aten op. Tensors have 8 elements, so that only the call
counts."""

from functools import partial

import torch

from .case import build
from .timing import interleave

ELEMENTS = 8


def small(name: str, device: str, grad: bool):
    """Returns (the case with 8 elements, its inputs). None if the case cannot be as small, or lacks an aten op,
    inputs or a gradient."""
    case = build(name, ELEMENTS, torch.float32, device)
    if case.aten is None or case.elements > ELEMENTS or not case.inputs or (grad and case.backward_bytes is None):
        return None
    return case, case.inputs if grad else tuple(x.detach() for x in case.inputs)


def measure(name: str, device: str, rounds: int) -> list[dict]:
    """Returns records with the microseconds of a call, without and with autograd recording it."""
    records = []
    for grad in (False, True):
        if (result := small(name, device, grad)) is None:
            continue
        case, inputs = result
        contenders = {"ours": partial(case.ours, *inputs), "bare": partial(case.aten, *inputs)}
        samples = interleave(contenders, rounds, "cpu", cold=False)  # "cpu": also on CUDA, the host's time is measured
        # The best sample counts: interruptions distort calls this short.
        ours_us, aten_us = (samples[who].best() * 1e6 for who in ("ours", "bare"))
        record = {"op": name, "grad": grad, "ours_us": ours_us, "aten_us": aten_us, "over_us": ours_us - aten_us}
        records.append(record)
        if device == "cuda":
            torch.cuda.synchronize()
    return records

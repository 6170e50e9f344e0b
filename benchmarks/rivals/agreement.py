"""A contender's error, which says whether it may compete: measured against the definition in fp64, on small operands.
With torch.compile, the function that it compiles is judged: compiling it twice would take minutes."""

from __future__ import annotations

import math

import torch

from . import contest
from .contest import Contest, Rival

# Relative to the largest magnitude. Halves may take eight roundings; in fp32 a blur loses digits when it cancels.
BUDGET = {"bf16": 2**-5, "fp16": 2**-8, "fp32": 2**-13}


def errors(name: str, who: str, device: str) -> dict[str, float]:
    """{"value": relative error, "gradient": the worst of all inputs, if there is one to compare}"""
    entry = contest.build(name, device, small=True)
    rival = entry.contenders()[who]
    truth, upstream, slopes = exact(entry)
    return against(entry, rival, truth, upstream, slopes)


def exact(entry: Contest) -> tuple:
    """(value, upstream gradient or None, gradients) of the definition in fp64."""
    inputs = [x.detach().double().requires_grad_() for x in entry.inputs]
    rest = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in entry.rest]
    value = entry.definition(*inputs, *rest)
    if not entry.backward:
        return value, None, []
    generator = torch.Generator(value.device).manual_seed(5)
    upstream = torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)
    return value.detach(), upstream, torch.autograd.grad(value, inputs, upstream, allow_unused=True)


def against(entry: Contest, rival: Rival, truth, upstream, slopes) -> dict[str, float]:
    function, inputs = rival.load(), [x.detach().clone().requires_grad_() for x in entry.inputs]
    out = function(*inputs, *entry.rest)
    results = {"value": error(entry.outcome(out, *inputs, *entry.rest), truth)}
    if rival.backward and entry.backward:
        theirs = torch.autograd.grad(out, inputs, upstream.to(out.dtype), allow_unused=True)
        pairs = [(a, b) for a, b in zip(theirs, slopes) if a is not None and b is not None]
        if pairs:  # (of JS, Liger's is that of the logarithms)
            results["gradient"] = max(error(a, b) for a, b in pairs)
    return results


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """The error in units of the largest magnitude; infinite where it is no number."""
    if a.shape != b.shape:
        return math.inf
    scale = b.abs().max().item() or 1.0
    result = (a.detach().double() - b).abs().max().item() / scale
    return result if math.isfinite(result) else math.inf


def agrees(by_part: dict[str, float], dtype: str) -> bool:
    return all(e <= BUDGET[dtype] for e in by_part.values())

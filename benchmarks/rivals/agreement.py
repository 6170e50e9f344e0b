"""Measures a contender's error against the definition in fp64, on small operands. A contender whose error is too large
is not timed. For torch.compile the eager function is measured, since compiling it twice would take minutes."""

from __future__ import annotations

import math

import torch

from . import contest
from .contest import Contest, Rival

# The largest error allowed, relative to the largest magnitude: eight roundings of bf16 or fp16. fp32 may have more,
# since differences of blurred images (SSIM) lose digits by cancellation.
BUDGET = {"bf16": 2**-5, "fp16": 2**-8, "fp32": 2**-13}


def errors(name: str, who: str, device: str) -> dict[str, float]:
    """Returns {"value": relative error of the value, "gradient": largest relative error of the inputs' gradients, if
    there is a gradient to compare}."""
    entry = contest.build(name, device, small=True)
    rival = entry.contenders()[who]
    truth, upstream, slopes = exact(entry)
    return against(entry, rival, truth, upstream, slopes)


def exact(entry: Contest) -> tuple:
    """Runs the definition in fp64. Returns (value, upstream gradient or None, gradients of the inputs)."""
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
        if pairs:  # empty if both have gradients of other inputs: Liger's JSD takes logarithms, ours probabilities
            results["gradient"] = max(error(a, b) for a, b in pairs)
    return results


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the largest error of `a`, divided by the largest magnitude of `b`; infinite if shapes differ or the error
    is not finite."""
    if a.shape != b.shape:
        return math.inf
    scale = b.abs().max().item() or 1.0
    result = (a.detach().double() - b).abs().max().item() / scale
    return result if math.isfinite(result) else math.inf


def agrees(by_part: dict[str, float], dtype: str) -> bool:
    return all(e <= BUDGET[dtype] for e in by_part.values())

"""clip_grad_norm_: torch's function with arithmetic in fp32, and a choice for gradients that are not finite."""

import types
import warnings
from collections.abc import Iterable
from typing import NoReturn

import torch

from safeops.amp._gradients import by_device, gradients, held, named, narrowed, order, total_norm
from safeops.core import check
from safeops.core.foreign import refuse, sign
from safeops.ops.lists.clip_grad_norm_ import scale_
from safeops.ops.lists.health import health_


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *extra: NoReturn,
    nonfinite: check.Nonfinite = "propagate",
    **unknown: NoReturn,
) -> torch.Tensor:
    """Scale the gradients in place so that their norm together is at most `max_norm`; return the norm before.

    As `torch.nn.utils.clip_grad_norm_`: each gradient is multiplied by `min(max_norm / (norm + 1e-6), 1)`. The norm is
    that of `grad_norm`, the factor is fp64, and the products are rounded once, from fp32 (fp64 for fp64). torch
    computes all of it in the gradients' own dtype, where fp16 gradients of a norm beyond 65504 become 0. If the factor
    is 1, nothing is written. Under GradScaler, call `scaler.unscale_(optimizer)` first, as with torch's.

    Args:
        parameters: a module, a tensor or an iterable of tensors; those without `.grad` are left out. Their gradients
            may differ in dtype, strides and device; one that several parameters share is scaled once. The norm of
            DTensors is that of `grad_norm` over all ranks; each rank scales its own shards by the same factor.
        max_norm: a number, at least 0.
        norm_type: order of the norm, a number above 0, or inf.
        nonfinite: what happens if a gradient has an inf or a NaN. `"propagate"`: as torch, a NaN makes all gradients
            NaN, an inf becomes NaN and makes all others 0. `"skip"`: all gradients stay as they are, for GradScaler to
            find, and the host does not wait. `"raise"`: an error, before anything is written; this synchronizes. All
            ranks that share DTensors do the same.

    Returns:
        The norm before, a 0-dim tensor: fp32, or fp64 if a gradient is; 0 on the CPU if there is no gradient.

    Raises:
        TypeError: `parameters` holds something other than tensors, or a tensor that can have no gradient (a gradient,
            say); a gradient is sparse, complex or of another subclass than DTensor, or some are DTensors and others
            are not; `max_norm` is no number.
        ValueError: `max_norm` is negative or NaN, `norm_type` not above 0, `nonfinite` not one of the three; elements
            of a gradient share memory; with `nonfinite="raise"`, a gradient is not finite.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
        >>> weight.grad = torch.full((4,), 60000.0, dtype=torch.float16)
        >>> safeops.clip_grad_norm_([weight], 1.0)
        tensor(120000.)
        >>> weight.grad
        tensor([0.5000, 0.5000, 0.5000, 0.5000], dtype=torch.float16)
    """
    if extra or unknown:
        refuse(clip_grad_norm_, extra, unknown)
    ord = order("clip_grad_norm_", norm_type)
    check.number("clip_grad_norm_", "max_norm", max_norm, minimum=0)
    check.choice("clip_grad_norm_", "nonfinite", nonfinite, check.NONFINITE)
    if isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:  # most often a loop has exhausted it
            warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3)
    keys, result = gradients("clip_grad_norm_", parameters)
    if not result:
        return torch.tensor(0.0)
    local_parts = list(map(held, result))
    _check_writable(keys, local_parts)
    norm = total_norm(result, ord)
    if nonfinite == "raise" and not norm.isfinite():
        raise ValueError(f"clip_grad_norm_: {_first_bad(keys, result, local_parts)}; the norm is {norm.item()}")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if nonfinite == "skip":
        factor = torch.where(norm.isfinite(), factor, 1.0)
    for group in by_device(local_parts):
        scale_(group, factor.to(group[0].device))
        torch.autograd.graph.increment_version(group)
    return narrowed(norm, result)


sign(clip_grad_norm_)  # (as a decorator it would hide the types)


def _check_writable(keys, grads):
    for key, grad in zip(keys, grads):
        if not grad.is_contiguous() and any(s == 0 and n > 1 for s, n in zip(grad.stride(), grad.shape)):
            raise ValueError(
                f"clip_grad_norm_: the gradient of {named(key)} cannot be scaled in place: its elements share memory "
                f"(shape {tuple(grad.shape)}, strides {grad.stride()})"
            )


def _first_bad(keys, grads, local_parts):
    for key, grad in zip(keys, local_parts):
        row = torch.zeros(1, 8, dtype=torch.int64, device=grad.device)
        health_(row, 0, [grad])
        nan, inf, minus_inf = row[0, :3].tolist()
        if nan or inf or minus_inf:
            return f"the gradient of {named(key)} {tuple(grad.shape)} has {nan} NaN and {inf + minus_inf} inf"
    elsewhere = "" if local_parts[0] is grads[0] else ", as far as this rank holds them"
    return f"the gradients are finite{elsewhere}, but not the sum of their powers"

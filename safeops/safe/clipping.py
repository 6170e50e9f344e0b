"""clip_grad_norm_, which comes to no mode: torch's calls its twin in threads that are in safe mode."""

import threading

import torch

from safeops.amp.clip_grad_norm_ import clip_grad_norm_
from safeops.amp.grad_norm import grad_norm
from safeops.core.private_torch import clipping_function
from safeops.safe import notes

_torchs = clipping_function.cell_contents
_lock, _users = threading.Lock(), 0


def install():
    global _users
    with _lock:
        _users += 1
        clipping_function.cell_contents = _clip


def remove():
    global _users
    with _lock:
        _users -= 1
        if not _users:
            clipping_function.cell_contents = _torchs


def _clip(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    if torch.compiler.is_compiling() or not notes.active() or notes.called_by_safeops():
        return _torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    parameters = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
    try:
        if error_if_nonfinite and not grad_norm(parameters, norm_type).isfinite():
            return _torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)  # with its error
        result = clip_grad_norm_(parameters, max_norm, norm_type)
    except (TypeError, ValueError):  # before any gradient is written
        return _torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    notes.note("clip_grad_norm_", "clip_grad_norm_")
    return result

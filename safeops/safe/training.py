"""Three functions of a training step that no mode sees: clip_grad_norm_, and the optimizer's `step` and `zero_grad`.

torch's clip_grad_norm_ calls its twin in threads that are in safe mode. The optimizer runs out of the mode: it has
nothing to replace, and six calls or more for each parameter.
"""

import functools
import threading

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from safeops.amp.clip_grad_norm_ import clip_grad_norm_
from safeops.amp.grad_norm import grad_norm
from safeops.core.private_torch import clipping_function, disable_dynamo
from safeops.safe import notes, presence

_torchs, _zero_grad = clipping_function.cell_contents, Optimizer.zero_grad
_lock, _users, _hook = threading.Lock(), 0, None


def install():
    global _users, _hook
    with _lock:
        _users += 1
        if _users == 1:
            clipping_function.cell_contents, Optimizer.zero_grad = _clip, _zero_grad_outside
            _hook = register_optimizer_step_pre_hook(_before_step)


def remove():
    global _users
    with _lock:
        _users -= 1
        if not _users:
            clipping_function.cell_contents, Optimizer.zero_grad = _torchs, _zero_grad
            _hook.remove()


# ---- clip_grad_norm_


def _clip(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    if not torch.compiler.is_compiling() and notes.active() and not notes.called_by_safeops():
        parameters = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
        try:
            with presence.outside():
                if not error_if_nonfinite or grad_norm(parameters, norm_type).isfinite():
                    norm = clip_grad_norm_(parameters, max_norm, norm_type)
                    notes.note("clip_grad_norm_", "clip_grad_norm_")
                    return norm
        except (TypeError, ValueError):
            pass  # no gradient has been written: torch's, with its errors
    return _torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


# ---- an optimizer


@disable_dynamo
@functools.wraps(_zero_grad)
def _zero_grad_outside(*args, **kwargs):
    with presence.outside():
        return _zero_grad(*args, **kwargs)


class _Arguments(tuple):
    """Those of a step. The frame that runs it holds them, and ends after an exception too: then the mode is back."""

    def __del__(self):
        presence.step_in()


def _before_step(optimizer, args, kwargs):
    closures = [x for x in (*args[1:], kwargs.get("closure")) if x is not None]  # which compute the loss
    if not torch.compiler.is_compiling() and notes.active() and not closures and presence.step_out():
        return _Arguments(args), kwargs
    return None

"""The functions of a training step that no mode sees: clip_grad_norm_, the optimizer's two, checkpoint.

torch's clip_grad_norm_ calls its twin in threads that are in safe mode. An optimizer's `step` and `zero_grad` run out
of the mode: they have nothing to replace, and six calls or more for each parameter. What is checkpointed is computed a
second time by the backward pass, where no mode is on: without its own it would save other tensors than the first time.
"""

import functools
import threading

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from safeops.amp.clip_grad_norm_ import clip_grad_norm_
from safeops.amp.grad_norm import grad_norm
from safeops.core.private_torch import checkpoint_function, clipping_function, disable_dynamo
from safeops.safe import notes, origins, presence

_clip_grad_norm, _checkpoint = clipping_function.cell_contents, checkpoint_function.cell_contents
_zero_grad = Optimizer.zero_grad
_lock, _users, _hook = threading.Lock(), 0, None


def install():
    global _users, _hook
    with _lock:
        _users += 1
        if _users == 1:
            clipping_function.cell_contents, checkpoint_function.cell_contents = _safe_clip, _safe_checkpoint
            Optimizer.zero_grad = _zero_grad_outside
            _hook = register_optimizer_step_pre_hook(_before_step)


def remove():
    global _users
    with _lock:
        _users -= 1
        if not _users:
            clipping_function.cell_contents, checkpoint_function.cell_contents = _clip_grad_norm, _checkpoint
            Optimizer.zero_grad = _zero_grad
            _hook.remove()


# ---- clip_grad_norm_


def _safe_clip(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
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
    return _clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


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


# ---- checkpoint


def _safe_checkpoint(function, *args, **kwargs):
    if notes.active() and not torch.compiler.is_compiling():
        function = functools.partial(_twice, function)
    return _checkpoint(function, *args, **kwargs)


def _twice(function, *args, **kwargs):
    with origins.off():
        if presence.is_inside():
            return function(*args, **kwargs)
        with presence.inside(), notes.silent():  # the second time: in backward, maybe in another thread
            return function(*args, **kwargs)

"""Patch the functions that no function mode sees: clip_grad_norm_, an optimizer's `step` and `zero_grad`, checkpoint,
and the attention modules' check for modes.

torch's clip_grad_norm_ calls its twin in threads that are in safe mode. An optimizer's `step` and `zero_grad` run
outside the mode: nothing in them is replaced, and they make six or more calls for each parameter. A checkpointed
function runs again in backward, where no mode is on: it enters the mode, or it would save other tensors than before.
"""

import functools
import sys
import threading

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from safeops.amp.clip_grad_norm_ import clip_grad_norm_
from safeops.amp.grad_norm import grad_norm
from safeops.core.dtypes import HALF
from safeops.core.private_torch import checkpoint_function, clipping_function, disable_dynamo, step_function
from safeops.safe import notes, origins, presence

_clip_grad_norm, _checkpoint = clipping_function.cell_contents, checkpoint_function.cell_contents
_zero_grad, _has_torch_function = Optimizer.zero_grad, torch.overrides.has_torch_function
_lock, _users, _hook = threading.Lock(), 0, None
_steps = {}  # id of a closure cell -> (the cell, the optimizer class's original step)


def install():
    global _users, _hook
    with _lock:
        _users += 1
        if _users == 1:
            clipping_function.cell_contents, checkpoint_function.cell_contents = _safe_clip, _safe_checkpoint
            Optimizer.zero_grad, torch.overrides.has_torch_function = _zero_grad_outside, _is_overridden
            _hook = register_optimizer_step_pre_hook(_before_step)


def remove():
    global _users
    with _lock:
        _users -= 1
        if not _users:
            clipping_function.cell_contents, checkpoint_function.cell_contents = _clip_grad_norm, _checkpoint
            Optimizer.zero_grad, torch.overrides.has_torch_function = _zero_grad, _has_torch_function
            _hook.remove()
            while _steps:
                _, (cell, step) = _steps.popitem()
                cell.cell_contents = step


# ---- clip_grad_norm_


def _safe_clip(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    if not torch.compiler.is_compiling() and notes.active() and not notes.called_by_safeops():
        every = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        try:
            with presence.outside():
                if every and not (error_if_nonfinite and _raises(every, norm_type)):
                    norm = clip_grad_norm_(every, max_norm, norm_type)
                    notes.note("clip_grad_norm_", "clip_grad_norm_")
                    return norm
        except (TypeError, ValueError):
            pass  # no gradient was written: torch's function raises its own error
        parameters = every or parameters  # (torch warns if it is a generator that is exhausted)
    return _clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _raises(parameters, norm_type):
    """True if the call is left to torch, which may raise for a norm that is not finite: no gradient is half, or the
    norm is not finite."""
    half = any(x.grad is not None and x.grad.dtype in HALF for x in parameters)
    return not half or not grad_norm(parameters, norm_type).isfinite()


# ---- an optimizer


@disable_dynamo
@functools.wraps(_zero_grad)
def _zero_grad_outside(*args, **kwargs):
    with presence.outside():
        return _zero_grad(*args, **kwargs)


def _before_step(optimizer, args, kwargs):
    if not torch.compiler.is_compiling():
        with _lock:
            cell = step_function(optimizer)
            if cell is not None and id(cell) not in _steps:
                _steps[id(cell)] = cell, cell.cell_contents
                cell.cell_contents = _outside(cell.cell_contents)


def _outside(step):
    @functools.wraps(step)
    def stepped(optimizer, *args, **kwargs):
        closures = [x for x in (*args, kwargs.get("closure")) if x is not None]  # they compute the loss, in the mode
        if closures or torch.compiler.is_compiling() or not notes.active():
            return step(optimizer, *args, **kwargs)
        with presence.outside():
            return step(optimizer, *args, **kwargs)

    return stepped


# ---- checkpoint


def _safe_checkpoint(function, *args, **kwargs):
    if notes.active() and not torch.compiler.is_compiling():
        function = functools.partial(_twice, function)
    return _checkpoint(function, *args, **kwargs)


def _twice(function, *args, **kwargs):
    with origins.off():
        if presence.is_inside():
            return function(*args, **kwargs)
        with presence.inside(), notes.silent():  # the second run: in backward, maybe in another thread
            return function(*args, **kwargs)


# ---- attention modules


def _is_overridden(tensors):
    """has_torch_function that does not see the mode in modules that need their fast path. Under a function mode torch's
    modules skip the fast path, but only it takes nested tensors, which an encoder makes from padded rows. Dense
    attention does not get it: there a row that is hidden whole is NaN."""
    asked_by = sys._getframe(1).f_code
    if not torch.compiler.is_compiling() and (
        asked_by is _ENCODER or asked_by in _ATTENTION and any(x is not None and x.is_nested for x in tensors)
    ):
        with presence.outside():
            return _has_torch_function(tensors)
    return _has_torch_function(tensors)


_ENCODER = torch.nn.TransformerEncoder.forward.__code__
_ATTENTION = [x.forward.__code__ for x in (torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)]

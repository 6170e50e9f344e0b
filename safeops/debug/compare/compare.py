"""Run a step in two settings, and compare what its modules return."""

import math
import os
from collections.abc import Callable
from typing import Any

import torch

from safeops.debug.compare import page
from safeops.debug.compare.capture import Capture, tensors
from safeops.debug.compare.comparison import Comparison
from safeops.debug.compare.entry import FORWARD, RESULT
from safeops.debug.compare.names import model_of
from safeops.debug.compare.projection import signs
from safeops.debug.compare.run import path_to_write, run_of
from safeops.debug.compare.state import State, copied

ONLY_WITHOUT_PROBES = "with sketches inside the compiled code nothing differs: this is the code as it was compiled"
ONLY_WITH_PROBES = "the code as it was compiled, without sketches inside, does not differ"
RANDOM = "the step draws random numbers: compiled code was compared with eager's, and not as it was compiled"


def compare(
    f: Callable,
    g: Callable,
    batch: Any,
    *,
    model: torch.nn.Module | tuple | None = None,
    slack: float = 1.0,
    html: str | os.PathLike | None = None,
) -> Comparison:
    """Name the first module whose output or gradient differs between f(batch) and g(batch) by more than rounding.

    The two are the same step in two settings: eager and compiled, float32 and bfloat16 under autocast, a model and its
    copy with other code or weights. Each gets a copy of the batch and the same random numbers, returns a loss or
    outputs, and backward runs from there (outputs get the gradient +-1 / sqrt(n), with fixed signs). Parameters,
    buffers, gradients and random states are as before when it is over.

    Each output and gradient is compared by a random projection to 64 numbers, which gives the length of the difference
    to about an eighth. Its budget grows with the depth: 4 sqrt(u_1^2 + ... + u_k^2) of the tensor's length at the k-th
    module call, u_j the unit roundoff of the coarser dtype; that of a gradient is larger by the square root of this
    (see docs/compare.md). The order is that of execution: a module before the one that contains it.

    Compiled functions are compiled once more for this, with the sketches as ops in their graph. The code from before is
    compared too, by what comes out of each compiled module and the parameters' gradients, and is used again after it.

    Args:
        f: a callable that takes the batch: a module, a compiled module, or a function. It must not run backward.
        g: another, the same step in another setting.
        batch: tensors, in tuples, lists and dicts; both get a copy.
        model: the module under f and g, if they are functions; or a pair, f's and g's.
        slack: a factor on all budgets.
        html: path of an HTML page: both runs' norms and their differences over the modules, the first one marked.

    Returns:
        A `Comparison`: print it. `.forward` and `.backward` are the first differences (`Difference`) or None, `.equal`
        is True if there is none.

    Raises:
        TypeError: f or g cannot be called, or is a function without `model`.
        ValueError: f or g runs backward or an optimizer, or calls no module of the model; slack is not positive.
        FileNotFoundError, IsADirectoryError: the page cannot be written.

    Example:
        >>> import copy
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        >>> changed = copy.deepcopy(model)
        >>> changed[0].weight.data = changed[0].weight.data.T
        >>> safeops.debug.compare(model, changed, torch.randn(4, 3)).forward.module
        '0 (Linear)'
    """
    models = _models(f, g, model)
    if isinstance(slack, bool) or not isinstance(slack, (int, float)) or not 0 < slack < math.inf:
        raise ValueError(f"compare: slack must be a positive number, got {slack!r}")
    file = None if html is None else path_to_write("compare", html, "html")
    state = State(models)
    try:
        with_probes = [_run(name, h, m, batch, state, True) for name, h, m in zip("fg", (f, g), models)]
        result = Comparison(*[run for run, _, _ in with_probes], slack, _notes(with_probes))
        result.require_common()
        if any(compiled for _, compiled, _ in with_probes):
            if any(random for _, _, random in with_probes):
                result.notes.append(RANDOM)
            else:
                as_is = [_run(name, h, m, batch, state, False) for name, h, m in zip("fg", (f, g), models)]
                runs = [run for run, _, _ in as_is]
                result = _merged(result, Comparison(*runs, slack, _notes(as_is), inside=result))
    finally:
        state.restore(gradients=True)
    if file is not None:
        page.write(file, result)
    return result


def _models(f, g, model):
    for name, h in (("f", f), ("g", g)):
        if not callable(h):
            raise TypeError(f"compare: {name} must be callable, got {type(h).__name__}")
    pair = model if isinstance(model, (tuple, list)) else (model, model)
    if len(pair) != 2 or not all(m is None or isinstance(m, torch.nn.Module) for m in pair):
        raise TypeError("compare: model must be a torch.nn.Module, or two of them, for f and for g")
    models = []
    for name, h, m in zip("fg", (f, g), pair):
        m = model_of(h) if m is None else m
        if m is None:
            raise TypeError(f"compare: {name} is a function: say which modules it calls, by model= (one, or a pair)")
        models.append(m)
    return models


def _run(name, function, model, batch, state, probes):
    """Returns (Run, True if compiled code was looked into, True if random numbers were drawn)."""
    state.restore()
    capture = Capture(model, probes).start()
    try:
        with torch.enable_grad():
            value = function(copied(batch))
            began = capture.backward_began or capture.updated
            if not began:
                capture.result(value)
                _backward(value)
    finally:
        capture.stop()
    if began:
        what = "ran an optimizer" if capture.updated else "ran backward"
        raise ValueError(f"compare: {name} {what}: return the loss, and compare runs backward from it")
    run = run_of(capture, name)
    if probes and all(entry.module == RESULT for entry in run.of(FORWARD)):
        raise ValueError(f"compare: {name} called no module of {type(model).__name__}: say by model= which it calls")
    return run, capture.compiled, state.drew_random_numbers()


def _backward(value):
    outputs = [x for _, x in tensors(value) if x.requires_grad]
    gradients = [
        torch.ones_like(x) if x.numel() == 1 else (signs(x.numel(), x.device) / x.numel() ** 0.5).to(x.dtype).view_as(x)
        for x in outputs
    ]
    if outputs:
        torch.autograd.backward(outputs, gradients)


def _notes(runs):
    return [f"{run.name} returned nothing that requires a gradient" for run, _, _ in runs if not _has_backward(run)]


def _has_backward(run):
    return any(entry.phase != FORWARD for entry in run.entries)


def _merged(inside, as_is):
    """One Comparison of both: that of the code with sketches inside, unless only the other one has a finding."""
    if inside.equal and not as_is.equal:
        as_is.notes.append(ONLY_WITHOUT_PROBES)
        return as_is
    if as_is.equal and not inside.equal:
        inside.notes.append(ONLY_WITH_PROBES)
    return inside

"""safe_mode: the context, the decorator, and the mode of a whole process."""

import atexit
import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from safeops.core import check
from safeops.safe import notes, origins, presence, training
from safeops.safe.report import Report

Function = TypeVar("Function", bound=Callable)
VARIABLE = "SAFEOPS_SAFE"


class SafeMode:
    """One safe mode with its report: what `with safe_mode()` enters."""

    def __init__(self):
        self.report = Report()

    def __enter__(self) -> Report:
        _refuse_tracing()
        if not notes.active():  # once per thread: a second function mode would replace a twin's own calls
            training.install()
            presence.enter()
        notes.reports().append(self.report)
        return self.report

    def __exit__(self, *error) -> None:
        reports = notes.reports()
        del reports[len(reports) - 1 - reports[::-1].index(self.report)]
        if not reports:
            presence.leave()
            training.remove()
            origins.forget()

    def __call__(self, function: Function) -> Function:
        return _wrapped(function, self)


def _refuse_tracing():
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        raise RuntimeError(
            "safe_mode: entered while torch.compile, torch.export or torch.jit traces: enter it around the compiled "
            "function, where it works"
        )


@overload
def safe_mode(function: None = None) -> SafeMode: ...
@overload
def safe_mode(function: Function) -> Function: ...
def safe_mode(function: Callable | None = None) -> Any:
    """Let torch's losses, softmax, norms, fills and half sums call their safeops twins, in unmodified code.

        with safeops.safe_mode() as report:        @safeops.safe_mode        SAFEOPS_SAFE=1 python train.py
            train()                                def train(): ...          safeops run train.py
        print(report)

    It replaces: the losses of `torch.nn.functional`; softmax and log_softmax (a row of -inf gives 0, or -inf, in place
    of NaN); `normalize`, `cosine_similarity`, `clip_grad_norm_`; `masked_fill` with a number beyond the dtype's range;
    fp16 sums, means and norms that are one number, which become fp32; the gradient of a division that `torch.where`
    selects from; the mean of nothing; sums and means of `x * mask`, for a boolean mask or one cast from a boolean.
    Every other function is torch's own, and so is a call whose arguments the twin does not take. A program whose
    results are finite and right stays the same: dtypes, graph, hooks, exceptions, values up to rounding; but losses in
    half become fp32. Modules of torch.nn are covered by the functions that they call.

    Works around a function compiled by torch.compile(fullgraph=True); the pairs of calls (`where` and a division, a
    reduction and its mask) are then torch's. The mode covers one thread; other threads enter their own. Modes nest,
    each with its report. The page docs/safe-mode.md lists what is covered, and what is not.

    Args:
        function: a function to run in safe mode; the report is its attribute `report`. None: return a context, which
            gives its `Report`, and is also a decorator.

    Returns:
        The function, with the same signature; without an argument, a context that is also a decorator. A report has
        `replacements`, a list of (function, twin, file, line, count), and `remarks` (function, remark, file, line,
        count) on problems that stay: a finite sum with NaN gradients, say. It prints as a table. In compiled code a
        call counts once, when it is traced.

    Raises:
        TypeError: `function` is not callable, is a class, a module, or a generator or coroutine function, whose body
            would run after the mode has ended.
        RuntimeError: the mode is entered while torch.compile, torch.export or torch.jit traces.

    Example:
        >>> scores = torch.full((1, 3), -torch.inf)
        >>> with safeops.safe_mode() as report:
        ...     scores.softmax(-1)
        tensor([[0., 0., 0.]])
        >>> [(x.function, x.twin, x.count) for x in report.replacements]
        [('softmax', 'masked_softmax', 1)]
    """
    return SafeMode() if function is None else _wrapped(function, SafeMode())


def _wrapped(function, region):
    if isinstance(function, (type, torch.nn.Module)) or not callable(function):
        kind = f"the class {function.__name__}" if isinstance(function, type) else type(function).__name__
        raise TypeError(f"safe_mode: function must be a function or a method, got {kind}")
    check.runs_when_called("safe_mode", "mode", function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        _refuse_tracing()  # raise a clear error: Dynamo's only says that it cannot enter this context
        with region:
            return function(*args, **kwargs)

    wrapper.report = region.report
    return wrapper


# ---- a whole process


@functools.cache
def enter_process():
    """Enter the mode until the process ends, in this thread. Its report goes to stderr at exit."""
    report = SafeMode().__enter__()

    @atexit.register
    def tell():
        if report.replacements or multiprocessing.parent_process() is None:  # no empty report of a worker
            with contextlib.suppress(OSError):
                print(report, file=sys.stderr)


def enter_by_environment():
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {value!r}")
    if value == "1":
        enter_process()

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
    """One entry, with its report: what `with safe_mode()` enters."""

    def __init__(self):
        self.report = Report()

    def __enter__(self) -> Report:
        _refuse_tracing()
        if not notes.active():  # a thread is in the mode once: a twin's own calls must not meet it a second time
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
    """Let torch's losses, softmax, norms, fills and half sums call their twins of safeops, in code nobody edits.

        with safeops.safe_mode() as report:        @safeops.safe_mode        SAFEOPS_SAFE=1 python train.py
            train()                                def train(): ...          safeops run train.py
        print(report)

    Replaced are the losses of `torch.nn.functional`, softmax and log_softmax (a row of -inf is 0, or -inf, in place of
    NaN), `normalize`, `cosine_similarity`, `masked_fill` with a number that the dtype does not hold, `clip_grad_norm_`,
    sums, means and norms of fp16 that are one number, which become fp32, the gradient of a division that `torch.where`
    selects from, the mean of nothing, and sums and means of `x * mask`, where the mask is boolean, or made of such by a
    cast. Everything else is torch's own function, and so are these where a twin does not take the arguments. A program
    whose result is finite and right is the same: dtypes, graph, hooks, exceptions, values to rounding; half losses come
    back as fp32. Modules of torch.nn are covered by the functions that they call.

    Works under torch.compile(fullgraph=True) around the compiled function; the pairs of calls (`where` and a division,
    a reduction and its mask) are then torch's. The mode is of one thread: another enters its own. Modes nest, each with
    its report. The page docs/safe-mode.md lists what is covered, and what is not.

    Args:
        function: a function to run in safe mode, whose report is its attribute `report`. None: a context, which gives
            its `Report`, or a decorator.

    Returns:
        The function, with the same signature; without an argument, a context that is also a decorator. A report has
        `replacements`, a list of (function, twin, file, line, count), and `remarks` (function, remark, file, line,
        count) on what is not mended: a sum that is finite over NaN gradients, say. It prints as a table; what runs
        compiled counts once, when it is traced.

    Raises:
        TypeError: `function` is not callable, is a class, a module, or a generator or coroutine function, whose body
            runs when the mode has been left.
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
        _refuse_tracing()  # in words, where Dynamo only knows that it cannot enter this context
        with region:
            return function(*args, **kwargs)

    wrapper.report = region.report
    return wrapper


# ---- a whole process


@functools.cache
def enter_process():
    """Enter the mode for good, in this thread; at the exit its report goes to stderr."""
    report = SafeMode().__enter__()

    @atexit.register
    def tell():
        if report.replacements or multiprocessing.parent_process() is None:  # no worker's empty one
            with contextlib.suppress(OSError):
                print(report, file=sys.stderr)


def enter_by_environment():
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {value!r}")
    if value == "1":
        enter_process()

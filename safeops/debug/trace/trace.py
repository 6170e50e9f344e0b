"""Trace: name the op, module and line that made the first NaN or inf of a training step.

One small kernel counts every floating tensor that an op reads or writes, on its device. The counts stay there until the
step ends. Then one transfer shows if all is finite; only a step that is not costs more.
"""

import dataclasses
import gc
import os
import warnings
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from safeops.core import private_torch
from safeops.debug.common import ranks
from safeops.debug.common.modules import ModuleStack
from safeops.debug.common.source import user_lines
from safeops.debug.page import page
from safeops.debug.page.board import Board
from safeops.debug.page.history import History
from safeops.debug.trace.origin import Step
from safeops.debug.trace.record import Recorder
from safeops.debug.trace.report import NonFiniteError

MOST_OPS = 200_000  # a step that reaches so many ops is checked before it ends
ACTIONS = ("raise", "warn", "record")


class trace:
    """Find the first op, forward or backward, whose result is not finite; say why, and what to write instead.

    with safeops.debug.trace(model) as tracer:
        for batch in loader:
            train_step(model, batch)  # NonFiniteError at the end of the first step that went wrong

    A step ends at `optimizer.step()`, before it writes the weights, at `scaler.update()`, at `tracer.check()`, and with
    the context. The search goes back from a loss or gradient that is not finite to the earliest op of the step that
    read finite values and wrote NaN or inf. A NaN or inf that reaches neither (a metric, a mask of -inf) is no finding.
    An overflow of a scaled gradient that GradScaler handles is kept in `tracer.overflows` and raises nothing.

    Args:
        model: for module paths ("decoder.layers.3"); without it, they begin with the class of the outermost module.
        action: at a finding, "raise" NonFiniteError, "warn", or only "record".
        last: how many of the ops before it the report shows.
        html: path of an HTML page, written when the context ends. A heat map of modules and steps shows, forward and
            backward, the largest magnitude, the share that underflows in fp16 and the share that is not finite, with
            fp16's limits; a table says which modules could run in half. The page is one file that loads nothing.
        log: a SummaryWriter, or another object with add_scalar and add_histogram: gets the same counts at each step.
        group: a process group whose ranks all trace and give one report. The finding is the one that comes first in the
            order of the step's ops, with its `rank`. That rank reports it, the others name it in a line. The ranks
            communicate at the end of a step, so all must end the same steps. None: this rank reports alone.

    Attributes:
        report: the first finding (`Report`), or None.
        reports: a list of all findings, one a step at most.
        overflows: a list of the overflows that GradScaler handled, one a step at most.
        steps: how many steps were checked.
        modules: with html= or log=, the counts and the verdict of each module (`ModuleCounts`), the worst first; also
            of functions outside modules, optimizers and GradScaler.

    Sees every op that goes through torch's dispatcher in this thread and in its backward passes, also under autocast,
    checkpointing and DistributedDataParallel. A compiled function runs eagerly inside, as under any dispatch mode,
    and may stay so. Other threads are not seen. Costs two counts an op, no synchronisation before the step ends.
    The memory for html= and log= is bounded: at most 1,024 columns of 48 bytes a module. In a longer run neighboring
    steps share a column: the larger magnitude, and the sum of the counts.

    Raises:
        NonFiniteError: a step went wrong and `action` is "raise"; its `report` is the finding.
        TypeError: `model` is no module, `html` no path, `log` no writer.
        ValueError: `action` is none of the three, `last` is negative, `group` is no group, or lacks this rank.
        FileNotFoundError, IsADirectoryError: the folder of `html` does not exist, or `html` is a folder.
        RuntimeError: a rank of the group does not answer within the group's timeout.

    Example:
        >>> x = torch.tensor([0.0, 2.0], requires_grad=True)
        >>> with safeops.debug.trace(action="record") as tracer:
        ...     (x * torch.log(x)).sum().backward()
        >>> tracer.report.op, tracer.report.kind, tracer.report.why
        ('log', 'undefined', 'log(0) is -inf: there is no finite value for it')
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        *,
        action: str = "raise",
        last: int = 12,
        html: str | os.PathLike | None = None,
        log: Any = None,
        group: Any = None,
    ):
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"trace: model must be a torch.nn.Module or None, got {type(model).__name__}")
        if action not in ACTIONS:
            raise ValueError(f"trace: action must be one of {', '.join(map(repr, ACTIONS))}, got {action!r}")
        if isinstance(last, bool) or not isinstance(last, int) or last < 0:
            raise ValueError(f"trace: last must be an int of at least 0, got {last!r}")
        if log is not None and not (hasattr(log, "add_scalar") and hasattr(log, "add_histogram")):
            raise TypeError(f"trace: log must have add_scalar and add_histogram, got {type(log).__name__}")
        ranks.check("trace", group)
        self.action, self.last, self._group = action, last, group
        # (made absolute now, as a script may change the working folder)
        self._html = None if html is None else page.path(html)
        recorded = html is not None or log is not None
        self._history = History(None if log is None else Board(log)) if recorded else None
        self.reports, self.overflows, self.steps = [], [], 0
        self._modules = ModuleStack(model)
        self._recorder = Recorder(self._modules, self._after)
        self._watching = self._scaled = False
        self._everyone = False  # True: all ranks give one report, as long as the script has a process group
        self._rank = None  # this process's rank, set when the ranks merge
        self._announces = True  # True: warn of a finding when another exception ends the context
        self._told = None  # a function to call with the number of each step, or None
        self._trained = False  # True after a backward pass: other results are metrics, unless check() asks for them

    @property
    def report(self):
        return self.reports[0] if self.reports else None

    @property
    def modules(self):
        if self._history is None:
            raise RuntimeError("trace: modules are counted with html= or log=")
        with private_torch.disable_modes():
            return self._history.modules(self._modules)

    def __enter__(self) -> "trace":
        if self._watching:
            raise RuntimeError("trace: this tracer is at work already; make another")
        self._modules.__enter__()
        # Look before the update, which would write NaN into the weights, and after it, as it may run a closure.
        self._optimizers = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._behind_update),
        ]
        # Thousands of records a step trigger full garbage collections, each through every object that torch has loaded.
        # Exclude the objects that exist now from them, unless the user has called gc.freeze already.
        self._froze = gc.get_freeze_count() == 0
        if self._froze:
            gc.freeze()
        self._recorder.__enter__()
        self._watching = True
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._recorder.__exit__(kind, error, traceback)
        self._watching = False
        if self._froze:
            gc.unfreeze()
        for hook in self._optimizers:
            hook.remove()
        self._modules.__exit__()
        try:
            is_report = isinstance(error, NonFiniteError)
            # After an exception the other ranks may not come to this point.
            result = None if is_report else self._look(not self._trained, together=kind is None)
            if kind is None:
                self._act(result)
            elif result is not None and result.bug and self._announces and issubclass(kind, Exception):
                # The finding may be the cause of the exception: report both, and let the exception pass.
                _warn(f"safeops.debug.trace, before the exception: {result}")
        finally:
            self._recorder.clear()
            if self._html:
                with private_torch.disable_modes():
                    page.write(self._html, self)

    def _restart(self):
        """Forget the findings: called in a forked process."""
        self._recorder.clear()
        self.reports, self.overflows, self.steps = [], [], 0

    def check(self):
        """End the step here: return its Report or None, and act on it as `action` says."""
        if not self._watching:
            raise RuntimeError("trace: check() outside the context")
        return self._act(self._look(True))

    def _act(self, report):
        if report is not None and report.bug:
            elsewhere = report.rank is not None and report.rank != ranks.rank()
            if self.action == "raise":
                raise NonFiniteError(report, elsewhere)
            if self.action == "warn" and not elsewhere:
                _warn(f"safeops.debug.trace, {report}")
        return report

    def _look(self, results, together=True):
        recorder, result, new = self._recorder, None, False
        with recorder.lock, private_torch.disable_modes(), torch.no_grad():
            if recorder.ops:
                step = Step(recorder, results)
                # An update, and the code after a training loop's last update, is no step of its own.
                new = results or step.backward
                self.steps += new
                if new and self._told:
                    self._told(self.steps)
                result = step.report(self.steps)
                if self._history is not None:
                    self._history.add(step, result, new)
                recorder.clear()
                self._trained = self._trained or step.backward
            group = ranks.everyone() if self._everyone else self._group
            if together and group is not None:
                self._rank = ranks.rank()
                result = self._first(result, group)
        if result is not None and not new and any(r.step == self.steps for r in self.reports[-1:]):
            return None  # the update only wrote the NaN that was found before it
        if result is not None:
            result.last = self.last
            (self.reports if result.bug else self.overflows).append(result)
        return result

    def _first(self, local_report, group):
        """The first finding of any rank. A cause has a smaller op index than its consequences on other ranks."""
        try:
            # (without the frames: they are many, and hold code objects)
            of_ranks = ranks.gather("trace", local_report and dataclasses.replace(local_report, frames=[]), group)
        except RuntimeError as error:
            raise error if local_report is None else NonFiniteError(local_report) from error
        of_ranks[self._rank] = local_report
        for rank, report in of_ranks.items():
            if report is not None:
                report.rank = rank
        reports = [report for report in of_ranks.values() if report is not None]
        return min(reports, key=lambda report: (not report.bug, report.index, report.rank), default=None)

    def _after(self, op):
        # A scaler steps its optimizers first, or skips them; then it updates its scale.
        if op.facts.scaler:
            self._scaled = True
        elif op.facts.name == "_amp_update_scale_":
            self._scaled = False
            self._end_of_step()
        elif len(self._recorder.ops) >= MOST_OPS:
            self._act(self._look(not self._trained, together=False))

    def _before_update(self, optimizer, args, kwargs):
        if not self._scaled:
            self._end_of_step()
        self._modules.leave(optimizer)  # in case it raised the last time
        self._modules.enter(optimizer)

    def _behind_update(self, optimizer, args, kwargs):
        self._modules.leave(optimizer)
        if not self._scaled:
            self._end_of_step()

    def _end_of_step(self):
        self._act(self._look(not self._trained))


def _warn(text):
    """Warn at the user's line, however deep in torch's hooks this is called."""
    lines = user_lines(2, most=1)
    warnings.warn_explicit(text, UserWarning, lines[0].file if lines else __file__, lines[0].number if lines else 1)

"""The flight recorder: watch a whole training, compiled or not, and replay the step that was not finite."""

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from safeops.debug.common.source import user_lines
from safeops.debug.recorder import checks, files
from safeops.debug.recorder.body import Body, Call, Unreadable
from safeops.debug.recorder.findings import Findings
from safeops.debug.recorder.guard import Guard
from safeops.debug.recorder.losses import collecting
from safeops.debug.recorder.ranks import exchange, is_replicated
from safeops.debug.recorder.state import Buffers, Slot, begin_scale, fall, hides_tensors, loss_scale
from safeops.debug.trace.report import NonFiniteError


class _Step:
    """The context of one step. body(*arguments): makes what runs it again."""

    __slots__ = ("recorder", "batch", "body", "slot", "collecting")

    def __init__(self, recorder, batch, body, *arguments):
        self.recorder, self.batch, self.body = recorder, batch, functools.partial(body, *arguments)

    def __enter__(self):
        self.slot = self.recorder._begin(self.batch, self.body)
        self.batch = self.body = None
        if self.slot is not None:
            self.collecting = collecting(self.recorder._losses)
            self.collecting.__enter__()

    def __exit__(self, kind, error, traceback):
        if self.slot is not None:
            self.collecting.__exit__(None, None, None)
            self.recorder._end(self.slot, error)


class recorder:
    """Record each step of a training, keep one that is not finite from the weights, and replay it under `trace`.

    recorder = safeops.debug.recorder(model, optimizer, folder="flight")
    for batch in loader:
        with recorder.step(batch):
            loss = train_step(batch)  # forward, backward, update; compiled or not

    A step keeps a copy of its batch and of the model's buffers, the states of the random generators, autocast's state
    and the loss scale. Its losses and gradients are scanned once, before the update. If one is not finite the update
    does nothing; the block runs again, eagerly, with what was recorded, and `NonFiniteError` names the op, module and
    line, as `safeops.debug.trace` does. The replay ends before the update. It calls the block's code: what else that
    does (printing, counting in an object) happens again.

    If the replay is finite, the step runs again as it was and with the backends "eager", "aot_eager" and "inductor",
    the first that is not finite is named, and the submodule that makes the difference alone is looked for.

    Args:
        model: the module that is trained; also compiled, DistributedDataParallel or fully_shard.
        optimizer: its optimizer, or several.
        folder: where `step-123/` is written at a finding: the report, its page, the batch, the states.
        steps: how many steps are kept, at least 1. On a GPU the answer comes some steps later: 2 usually do.
        scaler: a GradScaler. None: one that a variable of the block holds. Skips that only lower its scale are kept in
            `overflows`, and are no finding.
        action: at a finding, "raise" NonFiniteError at the end of the step, "warn", or only "record".
        protect: keep steps that are not finite from the weights. False: a replay may begin with later weights, and
            says so.
        save_weights: write the weights of the step, too; else their checksums.
        last: how many of the ops before it the report shows.

    Attributes:
        reports: the findings (`Recording`), at most 16; `found` counts all.
        overflows: reports of the overflows that GradScaler handled, at most 16.
        number: of the last step, from 1.

    Raises:
        NonFiniteError: a step was not finite and `action` is "raise".
        TypeError: `model` is no module, `optimizer` no optimizer, `scaler` no GradScaler.
        ValueError: `steps`, `action` or `last` is out of range, no parameter of `optimizer` is one of `model`.
        OSError: the folder cannot be made or written.
        RuntimeError: a step begins inside a step.

    An error of the recorder itself ends the recording with one warning, never the training.

    Example:
        >>> model = torch.nn.Linear(1, 1)
        >>> recorder = safeops.debug.recorder(model, torch.optim.SGD(model.parameters(), 0.1), action="record")
        >>> x = torch.zeros(4, 1)
        >>> with recorder.step(x):
        ...     (model(x) * 0).log().sum().backward()
        >>> recorder.reports[0].op, recorder.number
        ('log', 1)
    """

    take_over = None  # `safeops replay`: is called with the first step of a script, in its place

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        folder: str | os.PathLike = "flight",
        steps: int = 2,
        scaler: Any = None,
        action: str = "raise",
        protect: bool = True,
        save_weights: bool = False,
        last: int = 12,
    ):
        self._optimizers = checks.optimizers(model, optimizer)
        checks.options(scaler, steps, action, last)
        self.folder = files.prepared(folder)
        self.action, self.save_weights, self.last = action, bool(save_weights), last
        self.number = 0
        self._findings = Findings(self)
        self.reports, self.overflows = self._findings.reports, self._findings.overflows
        self._model, self._protect = model, bool(protect)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        parameters = checks.parameters(model, self._optimizers)
        self._devices = tuple({p.device for p in parameters})
        self._buffers = Buffers(model)
        self._slots = [Slot() for _ in range(steps)]
        self._losses = []
        self._guard = Guard(
            self._optimizers, parameters, self._protect, self._losses, self._findings.seen, self._watched
        )
        self._exchange = exchange()
        self._guard.by_grads = self._exchange is not None and is_replicated(model)
        self._is_open = self._is_off = self._replays = False
        self._holds_batch = False  # True when a batch has been looked for in the variables of its block
        self._said = set()

    # ---- a step

    def step(self, batch: Any) -> contextlib.AbstractContextManager[None]:
        """The context of one step. batch: tensors, or objects of them in any nesting, which the block uses by variables
        of its own: a replay takes the copies in their place."""
        return _Step(self, batch, Body, sys._getframe(1))

    def run(self, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Call `function(*args, **kwargs)` as a step whose batch is the arguments; return its result."""
        with _Step(self, (args, kwargs), Call, function, args, kwargs):
            return function(*args, **kwargs)

    def _begin(self, batch, body):
        """Begin a step. Returns its slot, or None if nothing is recorded."""
        if self._is_off or self._replays:
            return None
        if self._is_open:
            raise RuntimeError(f"recorder: step {self.number} is open: a step cannot begin inside it")
        self._finish()  # (an update that followed the last step)
        self.number += 1
        slot = self._slots[self.number % len(self._slots)]
        if recorder.take_over is not None:
            recorder.take_over(self, slot, batch, body)
        with self._watched():
            self._record(slot, batch, body)
        self._is_open = True
        return slot

    def _end(self, slot, error):
        self._is_open = False
        with self._watched():
            self._guard.end_of_step()
        if self._is_off or error is not None and not isinstance(error, Exception):
            return
        with self._watched():
            scale = loss_scale(self._scaler)
            if not self._findings.has_scan() or self._losses or scale is not None:
                fell = () if scale is None else [fall(scale, begin_scale(slot.scale), self._scaler)]
                self._guard.scan(fell, sticky=scale is None)
        self._finish(error)

    def _record(self, slot, batch, body):
        slot.forget()
        slot.number = self.number
        self._guard.begin_step()
        try:
            slot.body = body()
        except Unreadable as error:
            slot.why_not = f"the step cannot run again: {error}"
            self._once(f"a step that is not finite will not be replayed: {error}")
        if self._scaler is None and slot.body is not None:
            scalers = (x for x in slot.body.objects() if isinstance(x, torch.amp.GradScaler))
            self._scaler = next((x for x in scalers if x.is_enabled()), None)
        try:
            slot.fill(batch, self._devices, self._buffers, self._scaler)
        except Exception as error:  # of a tensor's class that cannot be cloned, or for want of memory
            slot.why_not = f"the step cannot run again: its batch could not be copied: {error}"
            self._once(f"a batch could not be copied, and its step cannot be replayed: {error}")
        if slot.body is None or self._holds_batch:
            return
        tensors = [x for x, _ in slot.copies.values()]
        self._holds_batch = bool(tensors)  # (to look at each variable of each step would take time)
        if not tensors and hides_tensors(batch):
            kind = type(batch).__name__
            self._once(f"a batch that is a {kind} is not copied: give lists, tuples, dicts or dataclasses")
        if tensors and not slot.body.holds(tensors):
            self._once(
                "no variable of the block holds the batch that step() was given: a replay reads the variables as they "
                "are by then, not the copy"
            )

    # ---- findings

    def _finish(self, error=None, last=False):
        """Look at the answers that have come, and act on a finding."""
        report = None
        with self._watched():
            report = self._findings.look(last)
        if report is None:
            return
        if self.action == "raise" and error is None:
            raise NonFiniteError(report, elsewhere=report.is_elsewhere, tool="recorder")
        if self.action != "record" and not report.is_elsewhere:
            self._warn(f"safeops.debug.recorder, {'before the exception: ' if error else ''}{report}")

    # ---- around

    def close(self) -> None:
        """Look at the last answers, and end the recording."""
        self._findings.wait()
        try:
            self._finish(last=True)
        finally:
            self._guard.remove()
            self._is_off = True

    @property
    def found(self) -> int:
        return self._findings.found

    def __enter__(self) -> "recorder":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()

    def __repr__(self):
        kept = sum(slot.nbytes() for slot in self._slots) + self._buffers.nbytes() * len(self._slots)
        state = "ended" if self._is_off else f"step {self.number}"
        return (
            f"<safeops.debug.recorder: {state}, keeps {len(self._slots)} steps in {kept / 2**20:.1f} MiB, "
            f"{self.found} not finite, {len(self.overflows)} scaled overflows, folder {str(self.folder)!r}>"
        )

    @contextlib.contextmanager
    def _watched(self):
        """An error of the recorder ends the recording, not the training."""
        try:
            yield
        except Exception as error:
            self._guard.remove()
            self._is_off = True
            self._warn(f"safeops.debug.recorder ended at step {self.number}: {type(error).__name__}: {error}")

    def _once(self, text):
        if text not in self._said:
            self._said.add(text)
            self._warn(f"safeops.debug.recorder: {text}")

    def _warn(self, text):
        lines = user_lines(2, most=1)
        file, number = (lines[0].file, lines[0].number) if lines else (__file__, 1)
        warnings.warn_explicit(text, UserWarning, file, number)

"""Record the training of a script that nobody edits: its optimizers, models and batches are found as it makes them.

A step lies between two batches of a DataLoader. Where none gives batches, each update of an optimizer ends a step.
"""

import functools
import os
import sys
import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from safeops.debug.recorder import files
from safeops.debug.recorder.loop import Asker, LoopBody
from safeops.debug.recorder.recorder import recorder
from safeops.debug.recorder.unedited_step import NO_LOADER, Step, model_of
from safeops.debug.trace.report import NonFiniteError

PATCHED = (
    *((DataLoader, "__iter__"), (torch.optim.Optimizer, "__init__"), (torch.amp.GradScaler, "scale")),
    (torch.autograd, "backward"),
)


def _safely(method):
    """An error of the recording ends the recording, not the training."""

    @functools.wraps(method)
    def safe(self, *args, **kwargs):
        if self.is_off:
            return
        try:
            method(self, *args, **kwargs)
        except NonFiniteError:
            raise
        except Exception as error:
            self.has_ended = True
            if self.recorder is not None:
                self.recorder._guard.remove()
            self.notes[f"the recording ended at step {self.steps}: {type(error).__name__}: {error}"] = None

    return safe


class Unedited:
    """A context in which the steps of a training are recorded; `recorder` is None until one begins.

    folder, steps, action, save_weights: as the recorder has them. told(report): is called with each finding.
    """

    def __init__(self, told, folder="flight", steps=2, action="raise", save_weights=False):
        self.told, self.action = told, action
        self.options = {"folder": files.prepared(folder), "steps": steps, "save_weights": save_weights}
        self.reports, self.overflows, self.steps, self.found = [], 0, 0, 0
        self.notes = {}  # text: None, in the order of their first mention
        self.recorder, self.step, self.has_ended = None, None, False
        self.optimizers, self.watched = weakref.WeakSet(), frozenset()

    def __enter__(self):
        self.process = os.getpid()
        self.before = [(owner, name, getattr(owner, name)) for owner, name in PATCHED]
        iterate, make, scale, backward = (function for *_, function in self.before)
        unedited = self

        @functools.wraps(iterate)
        def __iter__(self):
            return Batches(iterate(self), unedited)

        @functools.wraps(make)
        def __init__(self, *args, **kwargs):
            make(self, *args, **kwargs)
            unedited.optimizers.add(self)

        @functools.wraps(scale)
        def scaled(self, outputs):
            unedited._before_scale(self)
            return scale(self, outputs)

        @functools.wraps(backward)
        def recorded(*args, **kwargs):
            unedited._before_backward()
            return backward(*args, **kwargs)

        for (owner, name), function in zip(PATCHED, (__iter__, __init__, scaled, recorded)):
            setattr(owner, name, function)
        self.hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        return self

    def __exit__(self, kind, error, traceback):
        for owner, name, function in self.before:
            setattr(owner, name, function)
        for hook in self.hooks:
            hook.remove()
        self.action = "record"  # the caller prints what is left
        self._finish()

    @_safely
    def _finish(self):
        self._end()
        self._close()

    def _restart(self):
        """Forget what the parent has found: called in a forked process."""
        self.process = os.getpid()
        self.reports, self.overflows, self.steps, self.found, self.step = [], 0, 0, 0, None
        self._close()
        self.reports, self.overflows, self.steps, self.found = [], 0, 0, 0

    @property
    def is_off(self):
        """True in a replay, in a DataLoader's worker, and after an error of the recording."""
        replays = self.recorder is not None and self.recorder._replays
        return self.has_ended or replays or os.getpid() != self.process

    # ---- batches

    @_safely
    def before_batch(self, source):
        """End the step of the batch that the same loader gave before."""
        step = self.step
        if step and (source in step.sources or step.is_over or step.is_last and not step.is_trained):
            self._end()

    @_safely
    def after_batch(self, source, batch, is_last=False):
        """is_last: the loader gave no batch, but a generator between may still give one that it has."""
        if not torch.is_grad_enabled():
            return
        asker, step = Asker.of(sys._getframe(3)), self.step
        if is_last and (asker.is_direct or asker.offset is None):
            return
        if step is not None and step.asker is not None:
            if step.asker.is_same(asker):
                return step.add(source, batch)  # zip(loader, other_loader)
            if step.asker.offset is not None or asker.offset is None:
                return step.add_other(source, batch)
        self._end()
        self._begin(batch, asker, source, is_last)

    def _begin(self, *arguments):
        if (recorder := self._current()) is None:
            return
        self.step = Step(recorder, _is_loader, *arguments)
        self.steps += 1
        self._act()  # (what an earlier step's answer, which came late, has found)

    def _end(self):
        step, self.step = self.step, None
        if step is None or step.recorder is not self.recorder:
            return
        if step.is_trained:
            step.end()
        else:
            step.cancel()
            self.steps -= 1
        self._act()

    def _act(self):
        new = self.recorder.reports[self.seen :]
        self.seen += len(new)
        self.reports += new
        for report in new:
            self.told(report)
            if self.action == "raise":
                raise NonFiniteError(report, elsewhere=report.is_elsewhere, tool="recorder")

    # ---- the recorder

    def _current(self):
        """The recorder of the optimizers that are there now, or None without any."""
        optimizers = [x for x in self.optimizers if any(group["params"] for group in x.param_groups)]
        watched = frozenset(map(id, optimizers))
        if watched == self.watched or not optimizers:
            return self.recorder
        self._close()
        self.watched = watched
        updated = {id(p) for x in optimizers for group in x.param_groups for p in group["params"]}
        model = model_of(updated)
        if model is None:
            self.notes["no module holds the parameters of the optimizer: nothing is recorded"] = None
            return None
        self.seen = 0
        self.recorder = recorder(model, optimizers, action="record", **self.options)
        self.recorder.number = self.steps
        return self.recorder

    def _close(self):
        ended, self.recorder, self.watched = self.recorder, None, frozenset()
        if ended is None:
            return
        ended.close()
        new = ended.reports[self.seen :]
        self.reports += new
        for report in new:
            self.told(report)
        self.overflows += len(ended.overflows)
        self.found += ended.found

    # ---- training

    @_safely
    def _before_scale(self, scaler):
        if scaler.is_enabled():
            self._before_backward(trains=False)
            if self.step is not None:
                self.step.scales(scaler)

    @_safely
    def _before_backward(self, trains=True):
        if self.step is not None and self.step.is_over:
            self._end()
        if self.step is None:
            self._begin()
            if self.step is not None:
                self.notes["steps end with the optimizer's updates: " + NO_LOADER] = None
        if self.step is not None and trains:
            self.step.trains()

    @_safely
    def _before_update(self, optimizer, args, kwargs):
        self.optimizers.add(optimizer)  # one that was unpickled or copied
        if self.step is None and any(map(callable, (*args[1:], *kwargs.values()))):
            self._begin()  # the update's closure calls backward

    @_safely
    def _after_update(self, optimizer, args, kwargs):
        if self.step is not None and self.step.asker is None and self.step.is_trained:
            self._end()


class Batches:
    """The iterator of a DataLoader, which tells `unedited` of each batch."""

    def __init__(self, iterator, unedited):
        self._iterator, self._unedited = iterator, unedited

    def __iter__(self):
        return self

    def __next__(self):
        if (body := LoopBody.running) is not None:
            try:
                return body.again(id(self))
            except IndexError:
                return next(self._iterator)
        self._unedited.before_batch(id(self))
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._unedited.after_batch(id(self), None, is_last=True)
            raise
        self._unedited.after_batch(id(self), batch)
        return batch

    def __len__(self):
        return len(self._iterator)

    def __getattr__(self, name):
        if name in ("_iterator", "_unedited"):  # (of a copy that is not filled yet)
            raise AttributeError(name)
        return getattr(self._iterator, name)

    def __del__(self):
        """The loop was left. What it found is looked at later: nothing that is raised here would arrive."""
        step = self._unedited.step
        if step is not None and id(self) in step.sources:
            step.leave()


def _is_loader(x):
    return isinstance(x, (DataLoader, Batches))

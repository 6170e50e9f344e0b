"""A step of a script that nobody edits, and the model that it trains."""

import gc
import sys

import torch

from safeops.debug.recorder.body import Unreadable
from safeops.debug.recorder.loop import LoopBody
from safeops.debug.recorder.recorder import _Step
from safeops.debug.recorder.state import scaler_state

NO_LOADER = "no DataLoader gave its batch, so the begin of the step is not known"
BY_HAND = "its batch was taken by next(), not by a `for` loop whose body could run again"
OF_TRAINER = "{0} took its batch: give its Trainer a safeops.integrations.{1}.SafeopsRecorder"
TRAINERS = {"lightning": "lightning", "pytorch_lightning": "lightning", "transformers": "transformers"}
NOT_INSIDE = "backward was not called in the body of the loop that took the batch, at line {} of {}"


class Step:
    """A step of a recorder. asker: of its batch, or None: nobody asked. source: who gave it. is_last: as `after_batch`
    has it. is_loader: as `LoopBody` has it."""

    def __init__(self, recorder, is_loader, batch=None, asker=None, source=None, is_last=False):
        self.recorder, self.asker, self.sources, self.is_last = recorder, asker, {source}, is_last
        self.is_loader, self.batches = is_loader, [batch]
        self.body = None
        self.is_trained = self.is_over = False
        self.context = _Step(recorder, batch, self._body)
        self.context.__enter__()

    @property
    def slot(self):
        return self.context.slot  # None if the recorder has ended

    def _body(self):
        asker = self.asker
        if asker is None:
            raise Unreadable(NO_LOADER)
        if asker.offset is None:
            raise Unreadable(
                OF_TRAINER.format(asker.package, TRAINERS[asker.package]) if asker.package in TRAINERS else BY_HAND
            )
        self.body = LoopBody(asker, self.is_loader)
        return self.body

    def add(self, source, batch):
        """Take the batch of another loader of the same loop."""
        self.sources.add(source)
        self.batches.append(batch)
        self._copy(batch)

    def add_other(self, source, batch):
        """Take a batch that the step's own code asks for."""
        if self.body is not None and batch is not None:
            self.body.others.append((source, batch))
            self._copy(batch)

    def _copy(self, batch):
        if self.slot is not None:
            with self.recorder._watched():
                self.slot.add(batch)

    def scales(self, scaler):
        """A GradScaler scales the loss: its state is still that of the step's begin."""
        if self.slot is not None and self.recorder._scaler is not scaler:
            self.recorder._scaler = scaler
            self.slot.scale = scaler_state(scaler)

    def trains(self):
        """Backward is called: in the loop's body?"""
        if not self.is_trained and self.body is not None and not self.is_over:
            frame = sys._getframe(1)
            while frame is not None and frame is not self.asker.frame:
                frame = frame.f_back
            if frame is None or not self.body.contains(frame.f_lineno):
                block = self.body.block
                self._cannot(NOT_INSIDE.format(block.node.lineno, block.code.co_filename))
        self.is_trained = True

    def leave(self):
        """The body has ended: read the names that its loop has set."""
        self.is_over = True
        if self.asker is None or self.asker.frame is None:
            return
        if self.body is not None and self.is_trained and not self.body.is_bound:
            with self.recorder._watched():
                try:
                    self.body.bind(self.asker.frame.f_locals, self.batches)
                except Unreadable as error:
                    self._cannot(error)
        self.asker.frame = None  # its variables must not live as long as the step

    def _cannot(self, why):
        if self.slot is not None:
            self.slot.why_not = self.slot.why_not or f"the step cannot run again: {why}"

    def end(self):
        self.leave()
        self.context.__exit__(None, None, None)

    def cancel(self):
        """Forget the step: nothing was trained in it."""
        if self.slot is not None:
            self.context.collecting.__exit__(None, None, None)
            self.recorder._is_open = False
            self.recorder.number -= 1


def model_of(updated):
    """The module, among all objects, that holds the parameters with these ids; several as one; None without any."""
    modules = {}
    for x in gc.get_objects():
        kind = type(x)
        if issubclass(kind, torch.nn.Module):
            if "_parameters" in vars(x) and any(id(p) in updated for p in x.parameters()):
                modules[id(x)] = x
    inner = {id(part) for x in modules.values() for part in x.modules() if part is not x}
    outermost = [x for key, x in modules.items() if key not in inner]
    if len(outermost) < 2:
        return next(iter(outermost), None)
    names, together = {}, torch.nn.ModuleDict()
    for x in outermost:
        kind = type(x).__name__
        names[kind] = names.get(kind, 0) + 1
        together[kind if names[kind] == 1 else f"{kind}_{names[kind]}"] = x
    return together

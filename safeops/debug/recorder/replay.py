"""Run a recorded step again: eagerly under `trace`; and if that is finite, in the ways in which it may have run."""

import contextlib
import copy
import functools
import warnings

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from safeops.debug.recorder import files
from safeops.debug.recorder.guard import EndOfReplay
from safeops.debug.recorder.health import Flag, measured, mesh_of
from safeops.debug.recorder.losses import collecting
from safeops.debug.recorder.ranks import is_averaged, patience, place_in_mesh
from safeops.debug.recorder.report import Recording, unexplained
from safeops.debug.recorder.state import (
    autocast,
    copied,
    random_states,
    scaler_state,
    set_random_states,
    set_scaler_state,
)
from safeops.debug.recorder.suspects import eagerly, suspects
from safeops.debug.trace.trace import trace


class Replay:
    """A step of a recorder, to run again. update: the number of the update that its numbers did not reach; 0: it had
    none; -k: they came after k updates."""

    def __init__(self, recorder, slot, update):
        self.recorder, self.slot, self.update = recorder, slot, update
        self.model, self.guard = recorder._model, recorder._guard
        self.notes, self.error = [], None  # error: of the block, in the last replay
        self.generators = slot.body.generators() if slot.body is not None else {}

    def report(self, flag):
        """The finding, written into the recorder's folder; None if it waits until the ranks meet."""
        slot, ranks = self.slot, self.recorder._exchange
        path = self._path()
        meets = ranks is not None and (flag.is_shared or flag.in_grads and is_averaged(self.model))
        first = ranks.first if meets else lambda step, found: found
        if slot.body is None or slot.why_not:
            found = first(slot.number, self._recording(unexplained(slot.number, slot.why_not), path))
        else:
            if not self.recorder._protect or self.update not in (0, 1):
                self.notes.append("the replay begins with later weights: the step's own are not kept")
            spoiled = [name for name, p in self.model.named_parameters() if Flag([], measured([p])).ask(wait=True)]
            self.notes += [f"the parameter {name} held NaN or inf before the step" for name in spoiled[:3]]
            with self.before(), patience() if flag.is_shared else contextlib.nullcontext():
                found = self._recording(self.traced(path and path / "page.html"), path)
                found.index = -1 if spoiled else found.index  # no op of any rank comes before it
                found = first(slot.number, found)
                if found.is_unknown:  # (of several ranks, all look for an explanation, or none does)
                    found = first(f"{slot.number}, explained", self._recording(self._explained(), path))
        if ranks is not None and not meets:
            ranks.hold(found)
        if path is not None:
            try:
                files.write(path, self.recorder, slot, found)
            except Exception as error:  # a full disk: the finding is told all the same
                found.notes.append(f"not all could be written: {type(error).__name__}: {error}")
        return None if ranks is not None and not meets else found

    def _path(self):
        """The folder of the step, or None if it cannot be made."""
        try:
            return files.folder(self.recorder.folder, self.slot.number)
        except OSError as error:
            self.notes.append(f"the step is not kept: {error}")

    def _recording(self, report, path):
        report = report or unexplained(self.slot.number, "the replay is finite")
        report.step = self.slot.number
        return Recording.of(report, notes=[*self.notes], folder=str(path or ""), where=place_in_mesh(self.model))

    def traced(self, html=None):
        """The report of trace, or None if the step is finite."""
        tracer = trace(self.model, action="record", last=self.recorder.last, html=html)
        batch = self.slot.replaced()
        with warnings.catch_warnings():
            # of a compiled module that runs under trace's hooks, which is what a replay is for
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
            try:
                with tracer, eagerly():
                    self._run(batch)
            except OSError as error:  # of the page: the step's own do not come here
                self.notes.append(f"the page could not be written: {error}")
        return next(iter([*tracer.reports, *tracer.overflows]), None)

    def _explained(self):
        """The report of a step whose replay was finite: what else was tried, and what it gave."""
        if self.error is not None:
            return unexplained(self.slot.number, "the replay ended before it came to anything that is not finite")
        found = suspects(self.is_finite, self.model)
        self.notes += found.notes
        return unexplained(self.slot.number, found.why)

    def is_finite(self):
        """Run the step as it stands; True if its losses and gradients are finite."""
        with self.before():
            losses = self._run(self.slot.replaced())
            grads = self.guard.gradients()
            return not Flag(measured(losses), measured(grads), mesh_of(grads)).ask(wait=True)

    def _run(self, batch):
        losses, self.error = [], None
        self.guard.updates, self.guard.replay_until = 0, self.update
        try:
            with collecting(losses):
                self.slot.body(batch)
        except EndOfReplay:
            pass
        except Exception as error:
            self.error = error
            self.notes.append(f"the replay ended with {type(error).__name__}: {error}")
        finally:
            self.guard.end_of_step()
            self.guard.replay_until = None
        return losses

    @contextlib.contextmanager
    def before(self):
        """The state at the begin of the step; at the end, all is as it was."""
        recorder, slot, scaler = self.recorder, self.slot, self.recorder._scaler
        random, buffers = random_states(recorder._devices, self.generators), recorder._buffers.state()
        scale = scaler_state(scaler) if scaler is not None else None
        kept = [(x, copy.deepcopy(x.state_dict())) for x in _with_state(slot.body.objects())]
        grads = [(p, p.grad) for p in self.guard.parameters]
        groups = [(group, copied({key: x for key, x in group.items() if key != "params"}))
                  for optimizer in recorder._optimizers for group in optimizer.param_groups]  # fmt: skip
        handles = [register_optimizer_step_pre_hook(self._other), register_optimizer_step_post_hook(self.guard.after)]
        try:
            for p, _ in grads:
                p.grad = None
            set_random_states(slot.random, self.generators)
            recorder._buffers.set(slot.buffers)
            if slot.scale is not None:
                set_scaler_state(scaler, slot.scale)
            with autocast(slot.autocast), torch.set_grad_enabled(slot.grad_enabled), _alone(slot.body, self.model):
                yield
        finally:
            for p, grad in grads:
                p.grad = grad
            recorder._buffers.set(buffers)
            if scale is not None:
                set_scaler_state(scaler, scale)
            for x, state in kept:
                x.load_state_dict(state)
            for group, values in groups:
                group.update(values)
            for optimizer in recorder._optimizers:
                for name in ("grad_scale", "found_inf"):  # GradScaler's, left by an update that the replay ended
                    vars(optimizer).pop(name, None)
            for handle in handles:
                handle.remove()
            set_random_states(random, self.generators)

    def _other(self, optimizer, args, kwargs):
        """Before the update of an optimizer that the recorder was not given: it was made already."""
        if not any(optimizer is x for x in self.recorder._optimizers) and not torch.compiler.is_compiling():
            self.guard.keep(optimizer)


def _with_state(objects):
    """Learning rate schedulers and the like among the variables: the block may step them."""
    scheduler = torch.optim.lr_scheduler.LRScheduler
    return {id(x): x for x in objects if isinstance(x, scheduler)}.values()


@contextlib.contextmanager
def _alone(body, model):
    """Let DistributedDataParallel call its module and nothing else. Then each rank replays by itself: not even the
    buckets are rebuilt, which a second forward pass would do by a collective."""
    kind = torch.nn.parallel.DistributedDataParallel
    found = {id(m): m for x in (model, *body.objects()) if isinstance(x, torch.nn.Module)
             for m in x.modules() if isinstance(m, kind) and "forward" not in vars(m)}.values()  # fmt: skip
    for m in found:
        m.forward = functools.partial(m.module.__call__)
    try:
        yield
    finally:
        for m in found:
            del m.forward

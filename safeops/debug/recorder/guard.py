"""Keeps a step that is not finite from the weights, without waiting for a device.

| parameters | optimizer | how | cost |
|---|---|---|---|
| on the CPU | any | the update sees no gradients: it leaves each parameter without one as it is | none |
| on a device | fused | it reads `found_inf` there, as under GradScaler | none |
| on a device | another | parameters and state are copied before, put back after, on the device | both once more |
"""

import weakref

import torch

from safeops.core import check, private_torch
from safeops.debug.recorder.health import Flag, measured, mesh_of
from safeops.debug.recorder.state import copied


class EndOfReplay(BaseException):
    """Ends a replay before the update that the step's numbers must not reach."""


class Guard:
    """Hooks around the updates of some optimizers, and the scan of what they are about to apply.

    watched(): a context that keeps errors of the recorder from the training. losses: a list, which others fill, of the
    losses whose backward ran since the last scan.
    seen(flag, number of the update): is told of each scan; -k: it followed k updates, at the end of the step.
    """

    def __init__(self, optimizers, parameters, protect, losses, seen, watched):
        self.optimizers, self.parameters, self.protect = optimizers, parameters, protect
        self.updated = self._updated()
        self.earlier = set()  # of several optimizers: the versions of the gradients when the step began
        self.losses, self.seen, self.watched = losses, seen, watched
        self.by_grads = False  # True: a loss alone stops no update, since the other ranks would make it
        self.updates = 0  # of this step
        self.flag = self.versions = None  # of the last scan, until a block or an update follows
        self.pending = None  # the device's flags of a step that the host has not seen yet
        self.replay_until = None  # in a replay: the number of the update that ends it; 0: the block's end does
        self.undo = weakref.WeakKeyDictionary()
        self.handles = []
        for optimizer in optimizers:
            self.handles += [
                optimizer.register_step_pre_hook(self.before),
                optimizer.register_step_post_hook(self.after),
            ]

    def remove(self):
        for handle in self.handles:
            handle.remove()

    def _versions(self):
        """Equal for the same gradients, unless something wrote into them."""
        return [(id(grad), private_torch.version(grad)) for grad in self.gradients()]

    def _updated(self):
        return sum(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def gradients(self):
        if self.updated != self._updated():  # add_param_group
            self.updated = self._updated()
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            updated = (p for group in groups for p in group["params"])
            self.parameters = [*{id(p): p for p in (*self.parameters, *updated)}.values()]
        return [p.grad for p in self.parameters if p.grad is not None]

    def begin_step(self):
        self.updates, self.flag = 0, None
        self.losses.clear()
        if len(self.optimizers) > 1:
            self.earlier = set(self._versions())

    def _of_step(self, optimizer):
        """The gradients of this step. Those of other optimizers that it has not changed are an earlier step's: of one
        that GradScaler has skipped, they may be inf."""
        grads = self.gradients()
        if not self.earlier:
            return grads
        own = {id(p.grad) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else ()
        return [x for x in grads if id(x) in own or (id(x), private_torch.version(x)) not in self.earlier]

    def scan(self, numbers=(), sticky=True, optimizer=None):
        """numbers: further 0-dim tensors that must be finite. optimizer: the one whose update follows; None: the step
        has ended."""
        grads = self._of_step(optimizer)
        losses = [*measured(self.losses), *numbers]
        self.losses.clear()
        self.flag = Flag(losses, measured(grads), mesh_of(grads), self.pending if sticky else None, self.by_grads)
        self.pending = self.flag.both if sticky else None
        self.versions = self._versions()
        self.seen(self.flag, -self.updates if optimizer is None else self.updates)
        return self.flag

    def before(self, optimizer, args, kwargs):
        if torch.compiler.is_compiling():  # a compiled update: the scan comes at the end of the step
            return None
        arguments = {**dict(enumerate(args)), **kwargs}
        place = next((key for key, x in arguments.items() if callable(x) and x is not optimizer), None)
        if place is None:
            return self._before_update(optimizer)
        closure = arguments[place]

        def closed():  # the update's gradients are there when its closure has run
            result = closure()
            self._before_update(optimizer)
            return result

        arguments[place] = closed
        return tuple(arguments[i] for i in range(len(args))), {key: arguments[key] for key in kwargs}

    def _before_update(self, optimizer):
        with self.watched():
            self._look(optimizer)

    def _look(self, optimizer):
        self.updates += 1
        if self.replay_until is not None:
            if self.updates == self.replay_until:
                raise EndOfReplay
            self.keep(optimizer)
            return
        scaled = getattr(optimizer, "found_inf", None) is not None  # by GradScaler, which skips by itself
        flag = self.flag if self.flag is not None and self.versions == self._versions() else None
        flag = flag or self.scan(sticky=not scaled, optimizer=optimizer)
        self.flag = None
        if scaled or not self.protect:
            return
        if flag.known is not None:
            if flag.stops:
                self.keep(optimizer)
        elif is_fused(optimizer):
            optimizer.found_inf = flag.on_device
            self.undo[optimizer] = lambda: delattr(optimizer, "found_inf")
        else:
            self.undo[optimizer] = _put_back(optimizer, flag.on_device, flag.late)

    def after(self, optimizer, args, kwargs):
        if not torch.compiler.is_compiling() and (undo := self.undo.pop(optimizer, None)) is not None:
            undo()

    def end_of_step(self):
        """Undo what an update that raised has left."""
        for undo in [*self.undo.values()]:
            undo()
        self.undo.clear()

    def keep(self, optimizer):
        """Let the coming update of an optimizer change nothing."""
        if not type(optimizer).__module__.startswith("torch.optim"):  # it may expect a gradient of each parameter
            self.undo[optimizer] = _everything_back(optimizer)
            return
        hidden = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for p, _ in hidden:
            p.grad = None

        def undo():
            for p, grad in hidden:
                p.grad = grad

        self.undo[optimizer] = undo


def _everything_back(optimizer):
    """Copy parameters, state and groups of an optimizer. Returns a function that puts them back."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [copied(dict(optimizer.state[p])) if p in optimizer.state else None for p in parameters]
    values = [held(p).clone() for p in parameters]
    groups = [copied({key: x for key, x in group.items() if key != "params"}) for group in optimizer.param_groups]

    def undo():
        with torch.no_grad():
            for p, value, state in zip(parameters, values, states):
                held(p).copy_(value)
                optimizer.state.pop(p, None)
                if state is not None:
                    optimizer.state[p] = state
        for group, old in zip(optimizer.param_groups, groups):
            group.update(old)

    return undo


def is_fused(optimizer):
    return any(group.get("fused") for group in optimizer.param_groups)


def _put_back(optimizer, flag, late):
    """Copy what an update changes. Returns a function that puts it back where the flag is set. Tensors on the CPU, such
    as Adam's `step`, would have to wait for the flag: `late` gets them, as (tensor, value before)."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    before = [(held(p), held(p).clone()) for p in parameters]
    states = [{key: held(x).clone() for key, x in optimizer.state.get(p, {}).items() if isinstance(x, torch.Tensor)}
              for p in parameters]  # fmt: skip

    bad = flag > 0

    def undo():
        with torch.no_grad():
            for new, old in before:
                new.copy_(torch.where(bad.to(new.device), old, new))
            for p, state in zip(parameters, states):
                for key, x in optimizer.state.get(p, {}).items():
                    if not isinstance(x, torch.Tensor):
                        continue
                    new = held(x)
                    old = state.get(key, torch.zeros_like(new))  # what this update made begins as zeros
                    if new.device != bad.device:
                        late.append((new, old))
                    else:
                        new.copy_(torch.where(bad.to(new.device), old, new))

    return undo


def held(x):
    return (x.to_local() if check.mesh(x) is not None else x).detach()

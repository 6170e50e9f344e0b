"""locate_errors: raise an error at the op that caused it, with a description of the op's operands."""

import re

import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch.optim.optimizer import register_optimizer_step_post_hook

from safeops.core import private_torch
from safeops.debug.common.facts import facts, run, tensors_in
from safeops.debug.common.memory import Memory
from safeops.debug.common.modules import ModuleStack
from safeops.debug.common.source import Line, traceback_lines, user_frames
from safeops.debug.errors.bisect import Bisection
from safeops.debug.errors.modified import MODIFIED, modified
from safeops.debug.errors.site import Site, describe, has_storage

_DEVICES = re.compile(r"Expected all tensors to be on the same device|is not on the expected device|two devices")


class LocatedError(RuntimeError):
    """The error that `locate_errors` raises: `.site` is the op, `.line` the user's line, `.candidates` the ops that may
    have failed (more than one only with bisect=True). The original error is its `__cause__`."""

    def __init__(self, message, site=None, candidates=(), line=None):
        super().__init__(message)
        self.site, self.candidates = site, list(candidates)
        self.line: Line | None = line or (site.line if site else None)


class locate_errors(private_torch.TorchDispatchMode):
    """Raise errors of a step at the op that caused them, as LocatedError with op, operands, module and source line.

    An error on a device (an index out of range, an illegal memory access) is reported by whichever later op
    synchronizes first. Inside this context every op on a device is waited for, so the error belongs to the op that has
    just run. Two more errors, in which torch names the wrong line or none, are explained on every device: "modified by
    an inplace operation" (the lines that modified the tensor, made it and read it), and operands on different devices
    (where each was made).

    Args:
        model: for module paths, and for the names of parameters; without it, modules are named by their classes.
        bisect: wait at a few ops (at first every 64th) instead of at each. The error then lies between two waits. The
            next step or run (a CUDA error ends the process) waits at 16 places between these two, until one op is left.
        state: with bisect, the file that keeps these bounds between runs.

    Exceptions other than RuntimeError pass unchanged. Errors that the code inside catches itself change nothing.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with safeops.debug.locate_errors():
        ...     y = x.exp()
        ...     _ = y.clamp_(max=1.0)
        ...     y.sum().backward()
        Traceback (most recent call last):
        ...
        safeops.debug.LocatedError: locate_errors: clamp_ modified a tensor that backward needs, ...
    """

    def __init__(
        self, model: torch.nn.Module | None = None, *, bisect: bool = False, state: str = ".safeops-bisect.json"
    ):
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"locate_errors: model must be a torch.nn.Module or None, got {type(model).__name__}")
        super().__init__()
        self.modules, self.memory, self.earlier = ModuleStack(model), Memory(), Memory()
        self.names = {id(x): name for name, x in _tensors_of(model)}
        self.bisection = Bisection(state) if bisect else None
        self.failed = None  # (exception, Site, tensors) of the last op that raised
        self.ordinal, self.since = 0, []

    def __enter__(self) -> "locate_errors":
        self.modules.__enter__()
        self.hook = register_optimizer_step_post_hook(lambda *_: self.step())
        return super().__enter__()

    def __exit__(self, kind, error, traceback) -> None:
        super().__exit__(kind, error, traceback)
        self.hook.remove()
        self.modules.__exit__()
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, LocatedError):
                self._explain(error, traceback)
            elif error is None and self.bisection:
                self.step()
        finally:
            self.memory.clear()
            self.earlier.clear()

    def step(self):
        """End a step here (`optimizer.step()` does so by itself): ordinals of ops count from the start of a step."""
        if self.bisection and self.since:
            self._wait(self.since[-1][1])
        self.ordinal, self.since = 0, []
        # Keep the previous step: the next backward may need a tensor that the optimizer has just overwritten.
        self.earlier.clear()
        self.memory, self.earlier = self.earlier, self.memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(func, private_torch.OpOverload) or any(
            issubclass(x, UninitializedTensorMixin) for x in types
        ):
            return func(*args, **kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
        site = self._site(func, tensors)
        before = self._note_reads(func, site, tensors, args, kwargs)
        try:
            result = run(func, args, kwargs)
        except RuntimeError as error:
            self.failed = (error, site, tensors)
            raise
        outputs = list(tensors_in((result,)))
        self._note_writes(func, site, outputs, before)
        device = next((x.device for x in (*tensors, *outputs) if asynchronous(x.device)), None)
        if device is not None:
            self.since.append((site, device))
            if not self.bisection or self.bisection.stops_at(site.ordinal):
                self._wait(device)
        return result

    # ---- errors of a device

    def _wait(self, device):
        begun, self.since = self.since, []
        try:
            synchronize(device)
        except RuntimeError as error:
            sites = [site for site, _ in begun]
            where = self.bisection.narrow(sites[0].ordinal, sites[-1].ordinal) if self.bisection else ""
            first = str(error).strip().splitlines()[0]
            if len(sites) == 1:
                raise LocatedError(f"locate_errors: {first}\n  by {sites[0]}{where}", sites[0], sites) from error
            ends = f"\n  between {sites[0]}\n  and {sites[-1]}"
            raise LocatedError(
                f"locate_errors: {first}\n  by one of {len(sites)} ops{where}{ends}", None, sites
            ) from error

    # ---- what is recorded of every op

    def _site(self, func, tensors):
        node = private_torch.current_node()
        frames, in_engine, _ = user_frames(3)
        self.ordinal += 1
        operands = [describe(x) for x in tensors]
        return Site(
            facts(func).name, None if node is None or in_engine else node.name(), self.modules.path(), frames, operands,
            self.ordinal,
        )  # fmt: skip

    def _note_reads(self, func, site, tensors, args, kwargs):
        """Record which version of each tensor the op reads. Returns [(tensor, version)] for those it will write."""
        before = []
        for x in () if facts(func).returns_alias else tensors:
            if has_storage(x):
                self.memory.of(x).reads.append((private_torch.version(x), tuple(x.shape), site))
        for i, name in facts(func).writes:
            for x in tensors_in((args[i] if i < len(args) else kwargs.get(name),)):
                if has_storage(x):
                    before.append((x, private_torch.version(x)))
        return before

    def _note_writes(self, func, site, outputs, before):
        for x, version in before:
            self.memory.of(x).writes.append((version, tuple(x.shape), x.dtype, site))
        if not facts(func).writes and not facts(func).returns_alias:
            for x in outputs:
                if has_storage(x):
                    self.memory.of(x).writer = site

    # ---- errors that torch explains badly

    def _explain(self, error, traceback):
        message = str(error)
        lines = traceback_lines(traceback)
        if result := MODIFIED.search(message):
            raise LocatedError(*modified(result, lines, self.earlier, self.memory)) from error
        if self.failed is None or self.failed[0] is not error:
            return
        _, site, tensors = self.failed
        text = f"locate_errors: {message.splitlines()[0]}\n  by {site}"
        if _DEVICES.search(message):
            text += "".join(f"\n  {self._provenance(i, x)}" for i, x in enumerate(tensors))
        raise LocatedError(text, site, [site]) from error

    def _provenance(self, i, x):
        name = self.names.get(id(x)) or self.names.get(id(private_torch.base(x)))
        if name:
            return f"operand {i}, on {x.device}, is {name}"
        writer = self.memory.of(x).writer if has_storage(x) else None
        origin = f"was made by {writer.place}" if writer else "was made before this context"
        return f"operand {i}, on {x.device}, {origin}"


def asynchronous(device):
    return device.type not in ("cpu", "meta")


def synchronize(device):
    torch.accelerator.synchronize(device)


def _tensors_of(model):
    if model is None:
        return []
    parameters = (("parameter " + name, x) for name, x in model.named_parameters())
    return [*parameters, *(("buffer " + name, x) for name, x in model.named_buffers())]

"""Locate: make an error appear at the op that caused it, and say what the op was given."""

import dataclasses
import re

import torch
from torch.nn.parameter import UninitializedTensorMixin
from torch.optim.optimizer import register_optimizer_step_post_hook

from safeops import _torch
from safeops.debug._bisect import Bisection
from safeops.debug._facts import facts, run, tensors_in
from safeops.debug._memory import Memory
from safeops.debug._modules import ModuleStack
from safeops.debug._source import Line, line, traceback_lines, user_frames

_MODIFIED = re.compile(
    r"modified by an inplace operation: \[(?:torch\.)?(?:\w+\.)*(\w*)Tensor \[([\d, ]*)\]\]"
    r"(?:, which is output (\d+) of (\w+),)?.* is at version (\d+); expected version (\d+)"
)
_DEVICES = re.compile(r"Expected all tensors to be on the same device|is not on the expected device|two devices")
_TYPES = {
    "Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32, "Double": torch.float64,
}  # fmt: skip


@dataclasses.dataclass
class Site:
    """An op that ran: which, where, on what."""

    op: str
    node: str | None
    module: str
    frames: list
    operands: list[str]
    ordinal: int

    @property
    def line(self):
        return line(self.frames[0]) if self.frames else None

    def __str__(self):
        within = f" in the backward of {self.node}" if self.node else ""
        text = f"{self.op}{within}" + (f", module {self.module}" if self.module else "")
        text += f"\n  at {self.line}".replace("\n", "\n  ") if self.line else ""
        return text + "".join(f"\n  operand {i}: {operand}" for i, operand in enumerate(self.operands))


class LocatedError(RuntimeError):
    """What `locate_errors` makes of an error: `.site` is the op, `.line` the user's line, `.candidates` the ops it may
    have been (more than one only with bisect=True). The error itself is its `__cause__`."""

    def __init__(self, message, site=None, candidates=(), line=None):
        super().__init__(message)
        self.site, self.candidates = site, list(candidates)
        self.line: Line | None = line or (site.line if site else None)


class locate_errors(_torch.TorchDispatchMode):
    """Raise errors of a step at the op that caused them, as LocatedError with op, operands, module and source line.

    An error on a device (an index out of range, an illegal memory access) is reported by whatever op happens to look
    next. Inside this context every op on a device is waited for, so the error belongs to the op that has just run. And
    two errors that name the wrong line, or none, are explained on every device: "modified by an inplace operation"
    (which line modified the tensor, which made it, which need it), and operands on different devices (where each was
    made).

    Args:
        model: for module paths, and for the names of parameters; without it, modules are named by their classes.
        bisect: wait at 16 places instead of everywhere. An error is then known to lie between two of them, and the next
            step or run (an error of CUDA ends the process) looks between those two only, until one op is left.
        state: with bisect, the file that keeps what is known from run to run.

    Errors raised with another type than RuntimeError pass as they are. Expected errors that the code catches itself are
    its own business and change nothing.

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

    def __init__(self, model=None, *, bisect=False, state=".safeops-bisect.json"):
        if model is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"locate_errors: model must be a torch.nn.Module or None, got {type(model).__name__}")
        super().__init__()
        self.modules, self.memory, self.earlier = ModuleStack(model), Memory(), Memory()
        self.names = {id(x): name for name, x in _tensors_of(model)}
        self.bisection = Bisection(state) if bisect else None
        self.failed = None  # (the exception, where)
        self.ordinal, self.since = 0, []

    def __enter__(self):
        self.modules.__enter__()
        self.hook = register_optimizer_step_post_hook(lambda *_: self.step())
        return super().__enter__()

    def __exit__(self, kind, error, traceback):
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
        """End a step here (`optimizer.step()` does so by itself): ops are counted from its begin."""
        if self.bisection and self.since:
            self._wait(self.since[-1][1])
        self.ordinal, self.since = 0, []
        # The step before is kept: what an optimizer has just written, the next backward may need as it was.
        self.earlier.clear()
        self.memory, self.earlier = self.earlier, self.memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not isinstance(func, _torch.OpOverload) or any(issubclass(x, UninitializedTensorMixin) for x in types):
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

    # ---- what every op leaves behind

    def _site(self, func, tensors):
        node = _torch.current_node()
        frames, in_engine = user_frames(3)
        self.ordinal += 1
        operands = [_describe(x) for x in tensors]
        return Site(
            facts(func).name, None if node is None or in_engine else node.name(), self.modules.path(), frames, operands,
            self.ordinal,
        )  # fmt: skip

    def _note_reads(self, func, site, tensors, args, kwargs):
        """Who read which version; and of the tensors that the op will write, the versions before."""
        before = []
        for x in () if facts(func).returns_alias else tensors:
            if _has_storage(x):
                self.memory.of(x).reads.append((_torch.version(x), tuple(x.shape), site))
        for i, name in facts(func).writes:
            for x in tensors_in((args[i] if i < len(args) else kwargs.get(name),)):
                if _has_storage(x):
                    before.append((x, _torch.version(x)))
        return before

    def _note_writes(self, func, site, outputs, before):
        for x, version in before:
            self.memory.of(x).writes.append((version, tuple(x.shape), x.dtype, site))
        if not facts(func).writes and not facts(func).returns_alias:
            for x in outputs:
                if _has_storage(x):
                    self.memory.of(x).writer = site

    # ---- errors that torch explains badly

    def _explain(self, error, traceback):
        message = str(error)
        lines = traceback_lines(traceback)
        if found := _MODIFIED.search(message):
            raise LocatedError(*self._modified(found, lines)) from error
        if self.failed is None or self.failed[0] is not error:
            return
        _, site, tensors = self.failed
        text = f"locate_errors: {message.splitlines()[0]}\n  by {site}"
        if _DEVICES.search(message):
            text += "".join(f"\n  {self._provenance(i, x)}" for i, x in enumerate(tensors))
        raise LocatedError(text, site, [site]) from error

    def _modified(self, found, lines):
        """(message, site, candidates): the in-place write that backward stumbled over."""
        type_name, shape, _, maker, _, expected = found.groups()
        shape = tuple(int(size) for size in shape.split(",") if size.strip())
        writes = []
        for memory in (self.earlier, self.memory):
            for storage in memory.storages.values():
                for version, written, dtype, site in storage.writes:
                    exact = version == int(expected) and written == shape
                    if version >= int(expected) and dtype is _TYPES.get(type_name.rpartition(".")[2], dtype):
                        made = storage.writer is not None and bool(maker) and _same(storage.writer.op, maker)
                        rank = (site.node is None, exact, made, memory is self.memory, site.ordinal)
                        writes.append((rank, site, storage))
        if not writes:
            return f"locate_errors: {found.string}\n  by a line that ran outside this context", None, [], _first(lines)
        _, site, storage = max(writes, key=lambda write: write[0])
        text = f"locate_errors: {site.op} modified a tensor that backward needs, {_wanted(found)}\n  by {site}"
        if storage.writer is not None:
            text += f"\n  made by {_place(storage.writer)}"
        reads = [read for version, _, read in storage.reads if version == int(expected) and read.ordinal < site.ordinal]
        for place in list(dict.fromkeys(_place(read) for read in reads if read.op != "clone"))[:3]:
            text += f"\n  read before by {place}"
        if lines:
            text += f"\n  noticed at {lines[0].short}"
        return text + f"\n  instead: {_out_of_place(site.op)}", site, [site]

    def _provenance(self, i, x):
        name = self.names.get(id(x)) or self.names.get(id(_torch.base(x)))
        if name:
            return f"operand {i}, on {x.device}, is {name}"
        writer = self.memory.of(x).writer if _has_storage(x) else None
        made = f"was made by {_place(writer)}" if writer else "was made before this context"
        return f"operand {i}, on {x.device}, {made}"


def asynchronous(device):
    return device.type not in ("cpu", "meta")


def synchronize(device):
    torch.accelerator.synchronize(device)


def _tensors_of(model):
    if model is None:
        return []
    parameters = (("parameter " + name, x) for name, x in model.named_parameters())
    return [*parameters, *(("buffer " + name, x) for name, x in model.named_buffers())]


def _describe(x):
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}, stride {_stride(x)}"


def _stride(x):
    return tuple(x.stride()) if x.layout is torch.strided else x.layout


def _has_storage(x):
    return x.layout is torch.strided and x.device.type != "meta"


def _same(op, maker):
    """'mul' and 'MulBackward0' (or 'Mul', as torch 2.13 has it)."""
    return maker.partition("Backward")[0].replace("_", "").lower() == op.rstrip("_").replace("_", "").lower()


def _place(site):
    return f"{site.op} at {site.line.short}" if site.line else site.op


def _first(lines):
    return lines[0] if lines else None


def _wanted(found):
    return f"{found[1]}Tensor of shape [{found[2]}]"


def _out_of_place(op):
    name = op.rstrip("_")
    if name in ("index_put", "masked_fill", "copy", "fill"):
        return "safeops.masked_fill(x, mask, value), which makes a new tensor"
    return f"{name}, without the underscore, which makes a new tensor"

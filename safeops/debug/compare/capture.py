"""Sketches of all that a model's modules return in one step, of its gradients, and of the parameters' gradients."""

import collections
import contextlib
import math
import types

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from safeops.core import private_torch
from safeops.core.group import is_running
from safeops.debug.common.facts import is_plain
from safeops.debug.compare import compiled, names
from safeops.debug.compare.entry import BACKWARD, FORWARD, PARAMETERS, RESULT, Entry
from safeops.debug.compare.projection import STATS, sketch_of


class Capture:
    """Watches from `start` to `stop`, then `entries` are [(Entry, part of the whole projection or None), ...] in the
    order in which things happened.

    model: None to watch each module that is called, under the name of the outermost one's class.
    probes: True to look into compiled functions too, which are compiled once more for it; False to leave their code as
        it is, and see what comes out of them.
    scaler: a GradScaler by whose scale the loss is multiplied.
    """

    def __init__(self, model=None, probes=True, scaler=None):
        self.model, self.probes, self.scaler = model, probes, scaler
        self.modules = {}  # name -> module
        self.records, self.entries = [], []  # records: Entry, its numbers on the device; read when all is over
        self.calls = collections.Counter()
        self.outputs = collections.defaultdict(dict)  # (name, path) -> {call: index of its record}
        self.with_gradient = set()  # (name, path, call) for whose gradient a hook waits, or that have it
        self.names = {}  # id of a parameter -> (module's name, parameter's name)
        self.running, self.backward_began, self.updated = False, False, False
        self.compiled = False  # True if a probe ran: compiled code was looked into
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if is_running() else (0, 1)

    # ---- where it hooks in

    def start(self):
        from safeops.debug.compare import probe  # defines ops

        self.probe, self.before, probe.capture = probe, probe.capture, self
        self.stack = contextlib.ExitStack()
        self.running, self.configured = True, False
        if self.probes:
            compiled.enter(self.stack)
        if self.model is not None:
            self._watch(self.model, "")
        else:
            self.known = set()
            self.stack.callback(register_module_forward_pre_hook(self._meet).remove)
        self.stack.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        return self

    def stop(self):
        """Stop watching. The parameters' gradients that no optimizer has read so far are read now."""
        if not self.running:
            return self
        self._read_parameters(self.names, scaled=True)
        self.running, self.probe.capture = False, self.before
        self.stack.close()
        numbers = [torch.cat([numbers, part]).tolist() for _, numbers, part in self.records]  # waits for the device
        for (entry, _, part), values in zip(self.records, numbers):
            entry.stats, rest = values[: len(values) - len(part)], values[len(values) - len(part) :]
            self.entries.append((entry, rest or entry.stats[STATS:]))
        self.records = []
        return self

    def _meet(self, module, args):
        """Before a module's forward, where no model was given: watch it, if it is not inside one that is watched."""
        if torch.compiler.is_compiling() or id(module) in self.known:
            return
        if not (self.known and isinstance(module, torch.fx.GraphModule)):  # not a graph that a compiler made
            self._watch(module, type(names.unwrapped(module)).__name__)

    def _watch(self, root, prefix):
        if self.probes and not self.configured:
            self.configured = compiled.configure(self.stack)
        for name, module, is_wrapper in names.named_modules(root, prefix):
            if self.model is None and id(module) in self.known:
                continue
            if self.model is None:
                self.known.add(id(module))
            if is_wrapper:
                if names.is_compiled(module) and not self.probes:
                    self._hook(names.unwrapped(module), name, on=module)
                continue
            self.modules.setdefault(name, module)
            for parameter_name, parameter in module.named_parameters(recurse=False):
                self.names.setdefault(id(parameter), (name, parameter_name, parameter))
            if getattr(module, "_compiled_call_impl", None) is not None and not self.probes:
                self._around(module, name, module._compiled_call_impl)
            else:
                self._hook(module, name)

    def _hook(self, module, name, on=None):
        see, probed, probes = self._see, self.probe.probed, self.probes

        def hook(_, args, kwargs, output):
            if torch.compiler.is_compiling():
                return probed(output, name) if probes else None
            see(name, (args, kwargs), output)

        where = module if on is None else on
        self.stack.callback(where.register_forward_hook(hook, with_kwargs=True).remove)

    def _around(self, module, name, code):
        """A module after module.compile(): its hooks are inside the compiled code, and this is around it."""

        def call(*args, **kwargs):
            output = code(*args, **kwargs)
            self._see(name, (args, kwargs), output)
            return output

        module._compiled_call_impl = call
        self.stack.callback(setattr, module, "_compiled_call_impl", code)

    # ---- what it sees

    def _see(self, name, inputs, output):
        """After a module's forward, outside compiled code."""
        if not self.running:
            return
        received = {id(x) for _, x in tensors(inputs)}
        for path, x in tensors(output):
            call = self.output(name, path, x)
            # The gradient of a tensor that was only passed on is that of the module that made it.
            if call < 0 or not x.requires_grad or id(x) in received or (name, path, call) in self.with_gradient:
                continue
            self.with_gradient.add((name, path, call))
            x.register_hook(lambda gradient, at=(name, path, call): self.gradient(*at, gradient))

    def output(self, name, path, x):
        """Keep an output's sketch. Returns the number of the call, -1 where nothing was kept. Inside a backward pass it
        is a recomputation (checkpoint's): no call of its own, and the number is that of the call that it repeats."""
        x = _plain(x)
        if x is None or not self.running:
            return -1
        if private_torch.current_node() is not None:
            return self._repeated(name, path, x)
        call = self.calls[name, path]
        self.calls[name, path] += 1
        self.outputs[name, path][call] = len(self.records)
        self._keep(FORWARD, name, call, path, x)
        return call

    def _repeated(self, name, path, x):
        open_calls = [c for c in self.outputs[name, path] if (name, path, c) not in self.with_gradient]
        if len(open_calls) < 2:
            return open_calls[0] if open_calls else -1
        with torch.no_grad(), private_torch.disable_modes():
            projection = sketch_of(x)[STATS:]
            recorded = [self.records[self.outputs[name, path][c]][1][STATS:] for c in open_calls]
            distances = torch.stack([(r - projection).norm() for r in recorded])
        return open_calls[int(distances.argmin())]

    def gradient(self, name, path, call, gradient):
        self.backward_began = True
        if self.running and call >= 0 and (gradient := _plain(gradient)) is not None:
            self.with_gradient.add((name, path, call))
            self._keep(BACKWARD, name, call, path, gradient, self._scale(gradient.device))

    def result(self, value):
        """Keep what the step returned."""
        for path, x in tensors(value):
            self.output(RESULT, path, x)

    def _before_update(self, optimizer, args, kwargs):
        self.updated = True
        read = [id(p) for group in optimizer.param_groups for p in group["params"] if id(p) in self.names]
        if getattr(optimizer, "grad_scale", None) is not None:  # a fused optimizer divides by the scale itself
            self._read_parameters(read, scaled=True)
        else:
            self._read_parameters(read, scaled=False)

    def _read_parameters(self, ids, scaled):
        for i in list(ids):
            name, parameter_name, parameter = self.names.pop(i)
            gradient = parameter.grad
            if gradient is not None and (gradient := _plain(gradient)) is not None:
                scale = self._scale(gradient.device) if scaled else None
                self._keep(PARAMETERS, name, 0, parameter_name, gradient, scale)

    def _scale(self, device):
        scale = getattr(self.scaler, "_scale", None) if self.scaler is not None else None
        return None if scale is None else scale.to(device, torch.float64 if device.type != "mps" else torch.float32)

    def _keep(self, phase, name, call, path, x, scale=None):
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        module = self.modules.get(name)
        entry = Entry(phase, name, type(module).__name__ if module is not None else "", call, path, tuple(x.shape),
                      _name(x.dtype), autocast and _name(autocast), _terms(module), [])  # fmt: skip
        with torch.no_grad(), private_torch.disable_modes(), torch.autocast(kind, enabled=False):
            if scale is not None:
                x = x.to(scale.dtype) / scale
            stats = sketch_of(x)
            part = stats[:0]
            if self.rank and phase != PARAMETERS:
                part = sketch_of(x, self.rank * x.numel())[STATS:]
        self.records.append((entry, stats, part))


def _terms(module):
    """How many inputs each output of the module's own weight has; 1 without one."""
    own = module.parameters(recurse=False) if module is not None else ()
    return max((math.prod(p.shape[1:]) for p in own), default=1)


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _plain(x):
    """The tensor itself, dense and whole; None where a sketch has nothing to read."""
    if private_torch.transforms_active() or isinstance(x, private_torch.FakeTensor):
        return None
    if hasattr(x, "full_tensor"):  # a DTensor: a collective, which all ranks come to
        x = x.full_tensor()
    if x.layout is torch.sparse_coo:
        x = x.detach().coalesce().to_dense()
    return x if is_plain(x) else None


def tensors(value, path=""):
    """Yields (path, tensor) of all floating tensors in tuples, lists, dicts and objects with fields."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield path, value
    elif isinstance(value, dict):
        for name, x in value.items():
            yield from tensors(x, f"{path}[{name!r}]")
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, x in zip(value._fields, value):
            yield from tensors(x, f"{path}.{name}")
    elif isinstance(value, (tuple, list)):
        for i, x in enumerate(value):
            yield from tensors(x, f"{path}[{i}]")
    elif isinstance(value, types.SimpleNamespace) or hasattr(type(value), "__dataclass_fields__"):
        for name, x in vars(value).items():
            yield from tensors(x, f"{path}.{name}")

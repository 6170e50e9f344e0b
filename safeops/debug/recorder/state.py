"""The state that a step needs to run again: copies of its batch, random states, autocast, buffers and loss scale."""

import collections
import contextlib
import copy
import random
import sys
from collections.abc import Mapping

import torch

from safeops.amp._nested import map_tensors
from safeops.core import private_torch


class Slot:
    """The state at the begin of one step. A later step takes its memory."""

    def __init__(self):
        self.memory, self.number = {}, None
        self.forget()

    def forget(self):
        """Drop what the step held, but for memory that the next step can take."""
        self.body = self.batch = self.random = self.autocast = self.grad_enabled = self.scale = None
        self.why_not = None  # why the step cannot run again
        self.copies, self.buffers = {}, []  # copies: {id(tensor of the batch): (the tensor, its copy)}
        self.containers = {}  # {id(list, dict, ... of the batch): (itself, its copy)}: a block may pop from it

    def fill(self, batch, devices, buffers, scaler):
        free, self.memory = self.memory, {}
        self.batch = map_tensors(lambda x: self._copy(x, free), batch)
        self.containers = dict(_containers(batch, self.batch))
        self.random = random_states(devices, {} if self.body is None else self.body.generators())
        self.autocast = autocast_state(devices)
        self.grad_enabled = torch.is_grad_enabled()
        self.buffers = buffers.state()
        self.scale = scaler_state(scaler) if scaler is not None else None

    def add(self, batch):
        """Copy a further batch of the same step."""
        new = map_tensors(lambda x: self._copy(x, {}), batch)
        self.containers |= dict(_containers(batch, new))
        self.batch = self.batch, new

    def _copy(self, x, free):
        if id(x) in self.copies:
            return self.copies[id(x)][1]
        plain = type(x) is torch.Tensor and x.layout == torch.strided and not x.is_nested
        key = (x.shape, x.stride(), x.dtype, x.device) if plain else None
        with torch.no_grad():
            new = free[key].pop().copy_(x) if free.get(key) else x.detach().clone()
        if key is not None:
            self.memory.setdefault(key, []).append(new)
        self.copies[id(x)] = x, new  # (the tensor is kept, so that its id stays its own)
        return new

    def replaced(self, change=lambda x: x):
        """{id(tensor of the batch): a tensor with its values}, which the replay may write into; also the containers."""
        fresh = {key: change(new.clone()).requires_grad_(x.requires_grad) for key, (x, new) in self.copies.items()}
        of_copy = {id(new): fresh[key] for key, (_, new) in self.copies.items()}
        copies = {key: new for key, (_, new) in self.containers.items()}
        return fresh | {key: map_tensors(lambda x: of_copy.get(id(x), x), new) for key, new in copies.items()}

    def nbytes(self):
        batch = sum(x.nbytes for tensors in self.memory.values() for x in tensors)
        return batch + sum(x.nbytes for x in (self.random or {}).values() if isinstance(x, torch.Tensor))


def _containers(old, new):
    """Yield (id, (container, its copy)) of the containers of a batch that hold tensors."""
    if new is old or isinstance(old, torch.Tensor):
        return
    yield id(old), (old, new)
    if isinstance(old, Mapping):
        pairs = [(old[key], new[key]) for key in old]
    elif isinstance(old, (list, tuple)):
        pairs = zip(old, new)
    else:
        pairs = [(x, vars(new).get(name)) for name, x in getattr(old, "__dict__", {}).items()]
    for a, b in pairs:
        yield from _containers(a, b)


def hides_tensors(batch):
    """True for an object of a kind that `map_tensors` does not enter, and that holds tensors."""
    inner = [*getattr(batch, "__dict__", {}).values()]
    inner += batch if isinstance(batch, (collections.deque, set, frozenset)) else []
    return any(isinstance(x, torch.Tensor) for x in inner)


class BufferStates(list):
    """[(buffer, copy)]. owners: [(module, name, buffer)]: a module may put another tensor in its buffer's place."""

    def __init__(self, pairs, owners):
        super().__init__(pairs)
        self.owners = owners


class Buffers:
    """The buffers of a model. A step copies them, as BatchNorm's change in each; a large one only after a change."""

    LARGE = 1 << 20  # bytes

    def __init__(self, model):
        self.modules = [module for module in model.modules() if any(True for _ in module.buffers(recurse=False))]
        self.large = {}  # id(buffer) -> (its version, its copy)

    def state(self):
        owners = [(module, name, x) for module in self.modules for name, x in module.named_buffers(recurse=False)]
        return BufferStates([(x, self._copy(x)) for x in {id(x): x for *_, x in owners}.values()], owners)

    def _copy(self, x):
        if x.nbytes < self.LARGE or x.is_inference():
            return x.detach().clone()
        version, copied = self.large.get(id(x), (None, None))
        if version != private_torch.version(x) or copied.shape != x.shape:
            copied = x.detach().clone()
            self.large[id(x)] = private_torch.version(x), copied
        return copied

    def set(self, state):
        with torch.no_grad():
            for x, copied in state:
                # A graph may have saved the buffer: it is written only after a change.
                if type(x) is not torch.Tensor or x.is_meta or not torch.equal(x, copied):
                    x.copy_(copied)
        for module, name, x in getattr(state, "owners", ()):
            if module._buffers.get(name) is not x:
                setattr(module, name, x)

    def nbytes(self):
        return sum(x.nbytes for module in self.modules for x in module.buffers(recurse=False))


def autocast_state(devices):
    kinds = {"cpu", *(device.type for device in devices)}
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)]


@contextlib.contextmanager
def autocast(state):
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in state:
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
        yield


def random_states(devices, generators=None):
    """The states of all generators in use: Python's, NumPy's if it is imported, torch's of each device, and those of
    `generators` by their names."""
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    for device in devices:
        if device.type != "cpu" and (module := _generators(device)) is not None:
            states[str(device)] = module.get_rng_state(device)
    states["variables"] = {name: _state(x) for name, x in (generators or {}).items()}
    return states


def set_random_states(states, generators=None):
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    for name, state in states.items():
        fixed = name in ("python", "torch", "numpy", "variables")
        if not fixed and (module := _generators(torch.device(name))) is not None:
            module.set_rng_state(state, torch.device(name))
    for name, x in (generators or {}).items():
        if name in states.get("variables", ()):
            _set_state(x, states["variables"][name])


def is_generator(x):
    """True for an object with random numbers of its own: torch's, Python's or NumPy's."""
    numpy = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return isinstance(x, (torch.Generator, random.Random, *kinds))


def _state(x):
    if isinstance(x, random.Random):
        return x.getstate()
    return x.bit_generator.state if hasattr(x, "bit_generator") else x.get_state()


def _set_state(x, state):
    if isinstance(x, random.Random):
        x.setstate(state)
    elif hasattr(x, "bit_generator"):
        x.bit_generator.state = state
    else:
        x.set_state(state)


def _generators(device):
    """torch.cuda, or the module of another kind of device that has random states; None on a machine without it."""
    module = getattr(torch, device.type, None)
    usable = module is not None and hasattr(module, "get_rng_state") and module.is_available()
    return module if usable else None


def scaler_state(scaler):
    """The attributes of a GradScaler, tensors and dicts copied: it changes both in place."""
    return copied(vars(scaler))


def set_scaler_state(scaler, state):
    vars(scaler).update(copied(state))


def copied(x):
    if isinstance(x, torch.Tensor):
        return x.clone()
    if isinstance(x, dict):
        result = copy.copy(x)  # keeps a default factory
        result.update((key, copied(value)) for key, value in x.items())
        return result
    return x


def loss_scale(scaler):
    """The scale of a GradScaler, a tensor on its device; None before its first call."""
    return None if scaler is None else vars(scaler).get("_scale")


def fall(scale, before, scaler):
    """inf if the scale was lowered as after one or two overflows, else 0. (A user may set another scale.)"""
    once = before * scaler.get_backoff_factor()
    return torch.where((scale == once) | (scale == once * scaler.get_backoff_factor()), torch.inf, 0.0)


def begin_scale(state):
    """The scale in a state of a GradScaler: a tensor, or before its first call the number that it begins with."""
    scale = state["_scale"]
    return state["_init_scale"] if scale is None else scale

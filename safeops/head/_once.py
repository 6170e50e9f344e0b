"""A head of fully_shard or DDP: its parameters are gathered once a call, and its gradients are reduced once.

These wrappers work at the begin and the end of a module's forward. So all chunks run inside one forward of the module,
which computes the loss for that time; the module's other hooks wait for the calls of the chunks.
"""

import contextlib
import functools
import sys

import torch

from safeops.core import private_torch

FSDP = "torch.distributed.fsdp"
DDP = torch.nn.parallel.DistributedDataParallel


def once(head, hidden, run):
    """run(call, hidden) inside one forward of each wrapper; `call` is the head without the work of wrappers."""
    wrappers = list(dict.fromkeys(m for m in modules(head) if isinstance(m, DDP) or is_sharded(m)))
    if not wrappers:
        return run(head, hidden)
    inner = head.module if isinstance(head, DDP) else head

    def call(x):
        with contextlib.ExitStack() as stack:
            for module in wrappers:
                if not isinstance(module, DDP):
                    stack.enter_context(_Exchanged(_hooks(module, functools.partial(_cast, module))))
            return inner(x)

    return _inside(wrappers, hidden, functools.partial(run, call))


def is_sharded(module):
    """True for a module of fully_shard."""
    fsdp = sys.modules.get(FSDP)  # (importing it would take half a second)
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def modules(head, depth=3):
    """The modules of a head: its own, or those in the closure of a function."""
    if isinstance(head, torch.nn.Module):
        yield from head.modules()
    elif depth and callable(head) and not isinstance(head, type):
        held = [getattr(head, key, None) for key in ("__self__", "__wrapped__", "func")]
        for cell in getattr(head, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # (a variable that is not set yet)
                held.append(cell.cell_contents)
        for x in (*held, *getattr(head, "args", ()), *getattr(head, "keywords", {}).values()):
            yield from modules(x, depth - 1)


def _inside(wrappers, hidden, run):
    if not wrappers:
        return run(hidden)
    first, *rest = wrappers
    if isinstance(first, DDP):
        module, entries = first.module, _hooks(first.module, lambda name, hook: None)
    else:  # (its casts are left to the chunks: the loss is no logits)
        module, entries = first, _hooks(first, lambda name, hook: hook if _is_fsdp(hook) else None)
        entries.append((vars(private_torch.sharding_state(first)), *private_torch.NO_CASTS))

    def forward(x):
        with outside:  # (exchanges once more: a chunk finds the module as it was)
            return _inside(rest, x, run)

    outside = _Exchanged([*entries, (vars(module), "forward", forward)])
    with outside:
        return first(hidden)


def _is_fsdp(hook):
    return (getattr(hook, "__module__", None) or "").startswith(FSDP)


def _cast(module, name, hook):
    """In place of a hook of fully_shard, what it casts; other hooks as they are."""
    return private_torch.cast_hook(module, name) if _is_fsdp(hook) else hook


def _hooks(module, replaced):
    """Entries of `_Exchanged` for a module's hooks. replaced(name of their table, hook): the hook to call, or None."""
    entries = []
    for name in private_torch.MODULE_HOOKS:
        table = getattr(module, name)
        hooks = ((key, replaced(name, hook)) for key, hook in table.items())
        entries.append((vars(module), name, type(table)((key, hook) for key, hook in hooks if hook is not None)))
    return entries


class _Exchanged:
    """A context in which attributes have other values. Entered once more inside, they have their own again."""

    def __init__(self, entries):
        self.entries = entries  # (namespace, name, value)

    def __enter__(self):
        for i, (namespace, name, value) in enumerate(self.entries):
            own = namespace.pop(name, self)  # (self stands for no value)
            if value is not self:
                namespace[name] = value
            self.entries[i] = namespace, name, own

    def __exit__(self, *_):
        self.__enter__()

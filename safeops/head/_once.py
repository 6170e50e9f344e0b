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
    wrappers = list(dict.fromkeys(m for m in _modules(head) if isinstance(m, DDP) or is_sharded(m)))
    if not wrappers:
        return run(head, hidden)
    inner = head.module if isinstance(head, DDP) else head

    def call(x):
        with contextlib.ExitStack() as stack:
            for module in wrappers:
                if not isinstance(module, DDP):
                    stack.enter_context(_hooks_replaced(module, functools.partial(_cast, module)))
            return inner(x)

    return _inside(wrappers, hidden, functools.partial(run, call))


def is_sharded(module):
    """True for a module of fully_shard."""
    fsdp = sys.modules.get(FSDP)  # (importing it would take half a second)
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _modules(head, depth=3):
    """The modules of a head: its own, or those in the closure of a function."""
    if isinstance(head, torch.nn.Module):
        yield from head.modules()
    elif depth and callable(head) and not isinstance(head, type):
        held = [getattr(head, key, None) for key in ("__self__", "__wrapped__", "func")]
        for cell in getattr(head, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # (a variable that is not set yet)
                held.append(cell.cell_contents)
        for x in (*held, *getattr(head, "args", ()), *getattr(head, "keywords", {}).values()):
            yield from _modules(x, depth - 1)


def _inside(wrappers, hidden, run):
    if not wrappers:
        return run(hidden)
    first, *rest = wrappers
    is_ddp = isinstance(first, DDP)
    module, leave = (first.module if is_ddp else first), contextlib.ExitStack()

    def forward(x):
        leave.close()
        return _inside(rest, x, run)

    with leave:
        leave.enter_context(_hooks_replaced(module, lambda name, hook: None if is_ddp or not _is_fsdp(hook) else hook))
        leave.enter_context(_attribute(module, "forward", forward))
        if not is_ddp:  # (the casts are left to the chunks: the loss is no logits)
            leave.enter_context(private_torch.without_casts(first))
        return first(hidden)


def _is_fsdp(hook):
    return (getattr(hook, "__module__", None) or "").startswith(FSDP)


def _cast(module, name, hook):
    """In place of a hook of fully_shard, what it casts; other hooks as they are."""
    return private_torch.cast_hooks(module)[name] if _is_fsdp(hook) else hook


@contextlib.contextmanager
def _hooks_replaced(module, replaced):
    """replaced(name of a table of hooks, hook): the hook to call instead, or None."""
    with contextlib.ExitStack() as stack:
        for name in private_torch.MODULE_HOOKS:
            table = getattr(module, name)
            kept = type(table)((key, new) for key, hook in table.items() if (new := replaced(name, hook)) is not None)
            stack.enter_context(_attribute(module, name, kept))
        yield


@contextlib.contextmanager
def _attribute(module, name, value):
    own = module.__dict__
    before = own.get(name, own)
    own[name] = value
    try:
        yield
    finally:
        if before is own:
            own.pop(name, None)
        else:
            own[name] = before

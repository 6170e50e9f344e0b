"""A check that all ranks make the same call: compared before its collectives where TORCH_DISTRIBUTED_DEBUG asks for it.

torch compares, at DETAIL, what each collective sends. That does not say which call it belongs to, nor show ranks whose
messages are alike by chance: a mean of one rank and a sum of another are 16 bytes each. So the ranks tell each other
what they call, with the shapes, dtypes, placements and options that decide what is sent.
"""

import contextlib

import torch
import torch.distributed as dist

from safeops.core import check
from safeops.core.group import here, objects
from safeops.core.private_torch import TorchDispatchMode

COLLECTIVES = "c10d", "_c10d_functional", "_dtensor"  # the namespaces of torch's own ops
UNWATCHED = contextlib.nullcontext()
REDUCTIONS = "none", "mean", "sum"  # as raw ops count them


def is_asked():
    return dist.get_debug_level() != dist.DebugLevel.OFF


def agree(function, groups, operands):
    """Raise, on all ranks of the groups, where they do not call this function alike. operands: by name.

    groups: one, or those along the dims of a mesh, of which each hands on what the ranks of those before it told.
    """
    calls = {dist.get_rank(): {"": function, **{name: _shown(name, x) for name, x in operands.items()}}}
    for group in groups:
        answers = objects(function, "what the ranks call could not be compared", calls, group)
        calls = {rank: call for part in answers for rank, call in part.items()}
    first = min(calls)
    for rank, call in sorted(calls.items()):
        if differs := list(_differences(f"rank {first}", calls[first], f"rank {rank}", call)):
            raise RuntimeError(f"{here(function)}: the ranks do not make the same call: {'; '.join(differs)}")


def _differences(first, call, other, others):
    if call[""] != others[""]:
        yield f"{first} calls {call['']}, {other} {others['']}"
        return
    for name in dict.fromkeys((*call, *others)):
        values = call.get(name), others.get(name)
        if values[0] != values[1]:
            yield f"{name} is {values[0]} on {first}, {values[1]} on {other}"


def _shown(name, x):
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {check.shown(x)}"
    if isinstance(x, float) and x.is_integer():
        x = int(x)  # the same number, as a rank may write it
    return REDUCTIONS[x] if name == "reduction" else repr(x)


def watched(function, described, operands):
    """A context of a call on DTensors. The ranks of their mesh agree on it before its first collective, if asked to.

    described(operands): them by name.
    """
    return _Watch(function, described(operands)) if is_asked() else UNWATCHED


class _Watch(TorchDispatchMode):
    def __init__(self, function, operands):
        super().__init__()
        self.function, self.operands = function, operands

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # a DTensor's own ops come here, on what each rank holds
        if self.operands is not None and func.namespace in COLLECTIVES and "wait" not in func.__name__:
            operands, self.operands = self.operands, None
            mesh = next(m for m in map(check.mesh, operands.values()) if m is not None)
            agree(self.function, mesh.get_all_groups(), operands)
        return func(*args, **(kwargs or {}))

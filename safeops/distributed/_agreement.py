"""Check that all ranks make the same call, before its collectives, if TORCH_DISTRIBUTED_DEBUG asks for it.

At DETAIL, torch compares what each collective sends. That does not name the call, and does not notice messages that are
alike by chance: a mean on one rank and a sum on another send 16 bytes each. So the ranks exchange the name of the
function, with the shapes, dtypes, placements and options that decide what is sent.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from safeops.core import check
from safeops.core.group import here, objects
from safeops.core.private_torch import TorchDispatchMode

COLLECTIVES = "c10d", "_c10d_functional", "_dtensor"  # the namespaces of torch's own ops
UNWATCHED = contextlib.nullcontext()
REDUCTIONS = "none", "mean", "sum"  # index: the reduction's code in raw ops


def is_asked():
    return not is_compiling() and dist.get_debug_level() != dist.DebugLevel.OFF


def agree(function, groups, operands):
    """Raise on all ranks of the groups if their calls of this function differ. operands: {name: operand}.

    groups: one group, or one for each dim of a mesh. Each exchange passes on what the exchanges before it collected, so
    that all ranks of the mesh are compared.
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
        x = int(x)  # a rank may write 1, another 1.0
    return REDUCTIONS[x] if name == "reduction" else repr(x)


def watched(function, described, operands):
    """A context for a call on DTensors. If TORCH_DISTRIBUTED_DEBUG asks for it, the ranks of their mesh compare the
    call before its first collective.

    described(operands): returns {name: operand}.
    """
    return _Watch(function, described(operands)) if is_asked() else UNWATCHED


class _Watch(TorchDispatchMode):
    def __init__(self, function, operands):
        super().__init__()
        self.function, self.operands = function, operands

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "device_mesh") for kind in types):
            return NotImplemented  # the DTensor runs the op on its local part, which comes here again
        if self.operands is not None and func.namespace in COLLECTIVES and "wait" not in func.__name__:
            operands, self.operands = self.operands, None
            mesh = next(m for m in map(check.mesh, operands.values()) if m is not None)
            agree(self.function, mesh.get_all_groups(), operands)
        return func(*args, **(kwargs or {}))

"""Find the tensors that autograd has saved for backward, from the graph nodes that each call makes."""

import functools

import torch

from safeops.core import private_torch
from safeops.debug.common.memory import Memory
from safeops.debug.common.source import line, user_frames


class SavedTensors:
    """Call `note(result)` after a call, and `written(x)` before a write into x: it yields a pattern if x is needed."""

    def __init__(self):
        self.memory, self.nodes = Memory(), {}

    def clear(self):
        self.memory.clear()
        self.nodes = {}

    def note(self, result):
        results = result if isinstance(result, (tuple, list)) else (result,)
        new = [x.grad_fn for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None]
        frames = None
        while new:
            node = new.pop()
            if node is None or id(node) in self.nodes:
                continue
            self.nodes[id(node)] = node  # kept alive, so that no other node gets its id
            frames = frames or user_frames(3)[0]
            for x in _saved(node):
                self.memory.of(x).reads.append((private_torch.version(x), node, frames[0] if frames else None))
            new += [earlier for earlier, _ in node.next_functions]

    def written(self, x):
        """Yield the pattern if x shares memory with a saved tensor that nothing has changed since."""
        if x.layout is not torch.strided or x.is_meta:
            return
        for version, node, place in self.memory.of(x).reads:
            unfreed = any(True for _ in _saved(node))  # backward has not run yet
            if unfreed and version == private_torch.version(x):
                where = f" (made at {line(place).short})" if place else ""
                yield "saved-write", f"{node.name()}{where} has saved it"
                return


def _saved(node):
    for name in _attributes(type(node)):
        try:
            value = getattr(node, name)
        except RuntimeError:  # backward has run and freed it
            return
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_meta:
                yield x


@functools.cache
def _attributes(kind):
    """Names of the attributes in which a node of this class shows its saved tensors (a Python function:
    saved_tensors)."""
    names = [name for name in dir(kind) if name.startswith(private_torch.SAVED)]
    return names or [name for name in ("saved_tensors",) if hasattr(kind, name)]

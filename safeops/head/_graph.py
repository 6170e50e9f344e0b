"""The tensors with gradients that a head uses: its parameters, and what a function has in its closure.

They are found in the graph of its logits. It ends at leaves (AccumulateGrad), and at nodes that are older than the
call: there begin graphs of tensors that the head captured.
"""

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from safeops.core.private_torch import sequence, tensor_hooks, tree_leaves

LEAF = "AccumulateGrad"
SHARDED = "RegisterPostBackwardFunctionBackward"  # fully_shard's node, which reduces gradients in each backward


def ends(edge, begin=0):
    """Returns ({id: leaf}, [(node, index)] of the edges to nodes older than the sequence number `begin`, {names of the
    nodes between})."""
    leaves, older, names, seen, stack = {}, [], set(), set(), [(edge.node, edge.output_nr)]
    while stack:
        node, index = stack.pop()
        if node is None or node in seen:
            continue
        name = node.name().rpartition("::")[2]
        if name == LEAF:
            leaves[id(node.variable)] = node.variable
        elif sequence(node) < begin:
            older.append((node, index))
        else:
            names.add(name)
            seen.add(node)
            stack.extend(node.next_functions)
    return leaves, older, names


class _Arguments(TorchFunctionMode):
    """Collects the tensors with a graph that torch's functions receive."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen += [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.grad_fn is not None]
        return function(*args, **(kwargs or {}))


def captured(run, older, leaves):
    """The tensors of the edges in `older`, which run() uses; None if one is not found, or if its gradient cannot be
    told apart from that of a leaf that it was computed from."""
    with _Arguments() as arguments:
        run()
    found = {(x.grad_fn, x.output_nr): x for x in arguments.seen}
    tensors = {edge: found.get(edge) for edge in older}
    if any(x is None for x in tensors.values()):
        return None
    tensors = list(tensors.values())
    hooked = any(tensor_hooks(x) for x in tensors)
    return None if hooked or overlap(tensors, leaves) else tensors


def overlap(tensors, leaves):
    """True if a tensor was computed from one of the leaves, or from another of the tensors."""
    nodes = {x.grad_fn for x in tensors}
    for x in tensors:
        if x.grad_fn is None:
            continue
        theirs, _, _ = ends(get_gradient_edge(x))
        if theirs.keys() & leaves.keys():
            return True
        stack, seen = [node for node, _ in x.grad_fn.next_functions], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            if node in nodes:
                return True
            seen.add(node)
            stack.extend(node for node, _ in node.next_functions)
    return False

"""A head under torch's ColwiseParallel: each rank has some of the classes, and some or all of the rows.

What its hooks do to a plain tensor is done here: it becomes a DTensor in the layout that the style was given, with the
rows sharded under sequence parallel. The linear functions then gather the rows and leave the logits where they are.
"""

import torch

from safeops.core import check
from safeops.core.private_torch import colwise_layout
from safeops.head._once import is_sharded, once


def is_colwise(head):
    return not torch.compiler.is_compiling() and colwise_layout(head) is not None


def over_ranks(head, hidden, target, options, loss_of):
    """loss_of(layer, hidden, target, options) for a layer without hooks and DTensors; it is called inside the forward
    of fully_shard, if the head is one of its groups. The result is plain if `hidden` is."""
    mesh, placements = colwise_layout(head)
    from torch.distributed.tensor import DTensor, Replicate  # (slow to import, but the style has done that)

    everywhere = [Replicate()] * mesh.ndim

    def shared(x, layout):
        is_plain = isinstance(x, torch.Tensor) and x.dim() and check.mesh(x) is None
        return DTensor.from_local(x, mesh, layout, run_check=False) if is_plain else x

    def local(x):
        if check.mesh(x) is None:
            return x
        # (a copy: `to_local` returns a view, whose change in place would lose the hook by which fully_shard gathers)
        return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local().clone()

    def run(_, x):
        layer = torch.nn.Linear(1, 1, bias=head.bias is not None, device="meta")
        layer.weight, layer.bias = head.weight, head.bias
        x = x.to(layer.weight.dtype) if is_sharded(head) else x  # (its precision policy)
        operands = {key: shared(value, everywhere) for key, value in options.items()}
        result = loss_of(layer, shared(x, placements), shared(target, everywhere), operands)
        if check.mesh(hidden) is not None:
            return result
        return type(result)(*map(local, result)) if isinstance(result, tuple) else local(result)

    return once(head, hidden, run) if is_sharded(head) else run(head, hidden)

"""A head under torch's ColwiseParallel: each rank has some of the classes, and some or all of the rows.

What its hooks do to a plain tensor is done here: it becomes a DTensor in the layout that the style was given, with the
rows sharded under sequence parallel. The linear functions then gather the rows and leave the logits where they are.
"""

import torch

from safeops.core import check
from safeops.core.private_torch import colwise_layout
from safeops.head._loss import NAME
from safeops.head._once import is_sharded, modules, once


def is_colwise(head):
    return not torch.compiler.is_compiling() and colwise_layout(head) is not None


def refusing_parts(head, call):
    """`call`, the head, which raises if its result is a rank's own classes in a plain tensor: these are what a last
    layer under ColwiseParallel returns by default, and they would be taken for all classes."""
    layers = [m for m in modules(head) if isinstance(m, torch.nn.Linear)]
    sharded = [m for m in layers if is_colwise(m)]
    if not sharded:
        return call

    def checked(x):
        logits = call(x)
        if not isinstance(logits, torch.Tensor) or not logits.dim() or check.mesh(logits) is not None:
            return logits
        classes = logits.shape[-1]
        for layer in sharded:
            w = layer.weight
            is_part = check.mesh(w) is not None and len(w) > classes == len(w.to_local())
            if is_part and len(layers[-1].weight) != classes:  # (else a whole layer comes after it)
                raise ValueError(
                    f"{NAME}: head must return all {len(w)} classes, got this rank's {classes} of its layer under "
                    "ColwiseParallel, in a plain tensor: say ColwiseParallel(output_layouts=Replicate())"
                )
        return logits

    return checked


def over_ranks(head, hidden, target, options, loss_of):
    """loss_of(layer, hidden, target, options) for a layer without hooks and DTensors; it is called inside the forward
    of fully_shard, if the head is one of its groups. The result is plain if `hidden` is."""
    if options.get("support") is not None:
        raise TypeError(f"{NAME}: support= does not go with classes that are sharded: give the head all classes")
    mesh, placements = colwise_layout(head)
    from torch.distributed.tensor import DTensor, Replicate  # (slow to import, but the style has done that)

    everywhere = [Replicate()] * mesh.ndim

    def shared(x, layout):
        is_whole = isinstance(x, torch.Tensor) and (x.dim() or x.dtype == torch.bool) and check.mesh(x) is None
        return DTensor.from_local(x, mesh, layout, run_check=False) if is_whole else x

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

"""Decides the route of every call: kernel, composite (the definition, in torch ops) or compiled."""

import torch
from torch.compiler import is_dynamo_compiling

from safeops.core import availability, check
from safeops.core.private_torch import forward_ad, is_exporting, transforms_active

# Subclasses (DTensor, FakeTensor, user wrappers) take the composite: they have their own rules for its aten ops.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def route(op, operands):
    """How to run `op`'s kernel on these operands: (function, True if Dynamo traces it). None: run the composite.

    The kernel runs for plain tensors on a device that has it. functorch transforms and forward-mode AD run the
    composite: a custom op would give them wrong or zero tangents.
    """
    if transforms_active() or forward_ad._current_level >= 0:
        return None
    tensors = operands[: op.tensors]
    cpu = wanted = False
    cuda = None  # an operand on CUDA
    for x in tensors:
        if x is not None:
            if type(x) not in PLAIN:
                return None
            if x.is_cpu:
                cpu = True
            elif x.is_cuda:
                cuda = x
            else:  # (a meta operand would lead the dispatcher to the fake kernel)
                return None
            if x.requires_grad:
                wanted = True
    if cpu:
        if cuda is not None or not op.cpu:
            return None
    elif cuda is None:
        return None
    elif is_dynamo_compiling():
        if not availability.available(op.name, cuda.device.index):
            return None
    elif not op.cuda[cuda.get_device()]:
        return None
    if wanted:
        wanted = torch.is_grad_enabled()
        for x in tensors[op.constant_places]:
            if x is not None and x.requires_grad and wanted:
                return None
    if not is_dynamo_compiling():  # (non-strict export does not come here: its tensors are FakeTensors)
        return op.eager[wanted]
    kept = tensors[0].device.type in op.compiled and not is_exporting() and not _repeat(tensors)
    return op.traced[1 if wanted else 0] if kept else None  # (torch 2.11's Dynamo takes no bool as index)


def is_over_ranks(tensors):
    """True if an operand is a DTensor whose shards a kernel may take. False in a trace and under functorch."""
    if is_dynamo_compiling() or transforms_active() or forward_ad._current_level >= 0:
        return False
    return any(check.mesh(x) is not None for x in tensors if x is not None)


def _repeat(tensors):
    """True if one tensor is passed as two operands: Dynamo cannot trace such a call of an autograd.Function."""
    tensors = [x for x in tensors if x is not None]
    return any(x is y for i, x in enumerate(tensors) for y in tensors[:i])


def by_composite(grad):
    """True if a backward must run the composite: it is differentiated again, batched (vmap) or in forward-mode AD."""
    return (
        torch.is_grad_enabled()
        or type(grad) is not torch.Tensor
        or transforms_active()
        or forward_ad._current_level >= 0
    )


def differentiable_backward(definition, inputs, grad):
    """Gradients of `definition(*inputs)`: one per input, None if none is required. In grad mode they have a graph."""
    with torch.enable_grad():
        # Views: for a tensor passed as two arguments, autograd then returns two gradients, not their sum twice.
        inputs = [x.view_as(x) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in inputs]
        output = definition(*inputs)
    wanted = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    create_graph = torch.is_grad_enabled()
    grads = torch.autograd.grad(output, [inputs[i] for i in wanted], grad, create_graph=create_graph, allow_unused=True)
    result = [None] * len(inputs)
    for i, g in zip(wanted, grads):
        result[i] = g
    return result

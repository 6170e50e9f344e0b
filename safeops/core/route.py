"""Which of the three routes a call takes, kernel, composite or compile: the one place where that is decided."""

import torch
from torch.compiler import is_dynamo_compiling

from safeops.core import availability, check
from safeops.core.private_torch import forward_ad, is_exporting, transforms_active

# Subclasses (DTensor, FakeTensor, user wrappers) have rules of their own: they see the composite's aten ops.
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def route(op, operands):
    """How to run `op`'s kernel on these operands (one of `op.eager` or `op.traced`), or None: the composite.

    The kernel runs for plain tensors on a device that has it. functorch transforms and forward-mode AD run the
    composite: a custom op would give them wrong or zero tangents.
    """
    if transforms_active() or forward_ad._current_level >= 0:
        return None
    tensors = operands[: op.tensors]
    cpu = wanted = False
    cuda = None  # one of the operands there
    for x in tensors:
        if x is not None:
            if type(x) not in PLAIN:
                return None
            if x.is_cpu:
                cpu = True
            elif x.is_cuda:
                cuda = x
            else:  # the dispatcher would follow a meta operand to the fake kernel
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
    if not is_dynamo_compiling():  # (a non-strict export has no plain tensors)
        return op.eager[wanted]
    kept = tensors[0].device.type in op.compiled and not is_exporting() and not _repeat(tensors)
    return op.traced[1 if wanted else 0] if kept else None  # (Dynamo 2.11 takes no bool for an index)


def is_over_ranks(tensors):
    """True if an operand is a DTensor whose shards a kernel may take; a trace and functorch see the composite."""
    if is_dynamo_compiling() or transforms_active() or forward_ad._current_level >= 0:
        return False
    return any(check.mesh(x) is not None for x in tensors if x is not None)


def _repeat(tensors):
    """True if a tensor is two of the operands: Dynamo takes no autograd.Function of it."""
    tensors = [x for x in tensors if x is not None]
    return any(x is y for i, x in enumerate(tensors) for y in tensors[:i])


def by_composite(grad):
    """True where a backward must be differentiable, batched or dual itself, and so runs through the composite."""
    return (
        torch.is_grad_enabled()
        or type(grad) is not torch.Tensor
        or transforms_active()
        or forward_ad._current_level >= 0
    )


def differentiable_backward(definition, inputs, grad):
    """Gradients of `definition(*inputs)` for every input that requires one, as a graph of their own."""
    with torch.enable_grad():
        # Aliases, so that one tensor passed twice gets each argument's gradient and not their sum twice.
        inputs = [x.view_as(x) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in inputs]
        output = definition(*inputs)
    wanted = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    create_graph = torch.is_grad_enabled()
    grads = torch.autograd.grad(output, [inputs[i] for i in wanted], grad, create_graph=create_graph, allow_unused=True)
    result = [None] * len(inputs)
    for i, g in zip(wanted, grads):
        result[i] = g
    return result

"""Which of the three routes a call takes: kernel, composite or compile. The one place where that is decided."""

import torch
from torch.compiler import is_compiling

from safeops._torch import forward_ad, is_exporting, transforms_active

# Subclasses (DTensor, FakeTensor, user wrappers) have rules of their own: they see the composite's aten ops.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


def kernel(op, input, *others):
    """The calls of `op`'s raw kernel op where this call should run it, else None: the composite.

    The kernel runs for eager plain tensors on a device that has it. functorch transforms and forward-mode AD run the
    composite: a custom op would give them wrong or zero tangents.
    """
    if type(input) not in _PLAIN or transforms_active() or forward_ad._current_level >= 0:
        return None
    on_cpu = input.is_cpu
    for other in others:
        # One device type: the dispatcher would follow a meta operand to the fake kernel.
        if other is not None and (type(other) not in _PLAIN or not (other.is_cpu if on_cpu else other.is_cuda)):
            return None
    if is_compiling():
        return op.traced if _compiles_to_kernel(op, input) and not _repeat((input, *others)) else None
    if on_cpu:
        return op.eager if op.cpu else None
    return op.eager if input.is_cuda and op.cuda else None


def _repeat(operands):
    """Whether a tensor is two of the operands: Dynamo takes no autograd.Function of it."""
    operands = [x for x in operands if x is not None]
    return any(x is y for i, x in enumerate(operands) for y in operands[:i])


def _compiles_to_kernel(op, input):
    """Inductor fuses a composite with its neighbours, which wins on CUDA; our CPU kernels win, in half above all."""
    return op.cpu and input.device.type == "cpu" and not is_exporting()


def requires_grad(*tensors):
    """True where an operand wants a gradient that only the composite has."""
    return any(x is not None and x.requires_grad for x in tensors) and torch.is_grad_enabled()


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

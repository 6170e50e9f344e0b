"""The autograd Functions of a call in chunks: they stand in the graph for the head and its loss."""

import torch

from safeops.core.private_torch import is_batched, keeps_graph
from safeops.head._graph import overlap
from safeops.head._loss import NAME
from safeops.head._rows import whole
from safeops.head._sums import times


class WithGradients(torch.autograd.Function):
    """The reduced loss, with its gradients for an upstream gradient of 1."""

    @staticmethod
    def forward(ctx, chunks, value, gradients, hidden, *tensors):
        ctx.chunks = chunks
        ctx.save_for_backward(hidden, *tensors, *gradients)
        return value[0]

    @staticmethod
    def backward(ctx, grad):
        saved, many = ctx.saved_tensors, len(ctx.needs_input_grad) - 3  # (a checkpoint unpacks them once)
        inputs, gradients = saved[:many], saved[many:]
        if torch.is_grad_enabled():
            chunks = ctx.chunks
            results = again(chunks, grad, inputs[0], {}, inputs[1:], lambda rows: chunks.loss.finish(*rows))
            return None, None, None, *results
        last = not keeps_graph() and not is_batched(grad)
        results = [None if d is None else times(d, grad, x.dtype, last) for x, d in zip(inputs, gradients)]
        results[0] = masked(results[0], ctx.chunks.loss.keep)
        return None, None, None, *results


class Recomputed(torch.autograd.Function):
    """The results of the rows; backward runs the head again."""

    @staticmethod
    def forward(ctx, chunks, results, names, hidden, *tensors):
        ctx.chunks, ctx.names = chunks, names
        ctx.save_for_backward(hidden, *tensors)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx, grad, *_):
        hidden, *tensors = ctx.saved_tensors
        none = None, None, None
        if grad is None:
            return *none, *[None] * (1 + len(tensors))
        operands = dict(zip(ctx.names, tensors))
        tensors, chunks = tensors[len(operands) :], ctx.chunks
        if torch.is_grad_enabled():
            return *none, *again(chunks, grad, hidden, operands, tensors, lambda rows: rows[0])
        keep = chunks.loss.keep
        grad = grad if keep is None else torch.where(keep, grad, 0)
        sums = chunks.gradients(grad, hidden, operands, tensors)
        of_operands = [sums.by_row.get(key, sums.shared.get(id(t))) for key, t in operands.items()]
        shared = [sums.shared.get(id(t)) for t in tensors]
        shared = [d if d is None else d.to(t.dtype) for t, d in zip(tensors, shared)]
        of_operands = [d if d is None else d.to(t.dtype) for t, d in zip(operands.values(), of_operands)]
        return *none, masked(sums.hidden, keep), *of_operands, *shared


def masked(d_hidden, keep):
    """(the gradient of a row that is not kept may be 0 times inf or NaN)"""
    if d_hidden is None or keep is None:
        return d_hidden
    return d_hidden.masked_fill(~keep.unsqueeze(1), 0)


def again(chunks, grad, hidden, operands, tensors, finish):
    """The gradients with a graph, for a second derivative: from all rows at once."""
    inputs = [hidden, *operands.values(), *tensors]
    wanted = [x for x in inputs if x.requires_grad]
    if overlap([x for x in wanted if not x.is_leaf], {id(x): x for x in wanted if x.is_leaf}):
        raise RuntimeError(
            f"{NAME}: no second derivative where hidden, or another operand, was computed from the head's parameters "
            "(tied weights): compute the logits and call the loss of logits"
        )
    with torch.enable_grad(), chunks.surroundings.again():
        rows = whole(chunks.call, chunks.loss, hidden, operands)
        grads = torch.autograd.grad(finish(rows), wanted, grad, create_graph=True, allow_unused=True)
    grads = {id(x): d for x, d in zip(wanted, grads)}
    return [grads.get(id(x)) for x in inputs]

"""Builds the autograd Function of an op: forward saves tensors, backward computes the gradients that are needed."""

from typing import NamedTuple

import torch

from safeops.core.library import raise_cause


class Like(NamedTuple):
    """Stands for an operand that the op is linear in: backward needs no more of it, so the tensor is not saved."""

    shape: torch.Size
    dtype: torch.dtype


def autograd_function(op):
    """The autograd Function around an op's raw forward."""
    raw, reads, linear, tensors, visible, keep = op.forward, op.read_places, op.linear, op.tensors, op.visible, op.keep
    by_composite, named, Operands, Saved = op.by_composite, op.named, op.Operands, op.Saved
    save, several, results_read, saved = op.save, op.returns > 1, op.saved_places, len(op.Saved._fields)
    chooses, sum_to, gradient_places = op.keep is not None, op.sum_to, op.gradient_places
    defaults, unsaved = op.defaults, linear or len(op.defaults) > tensors

    def forward(ctx, *operands):
        results = raw(*operands)
        if chooses:
            kept = keep(results, operands[reads])
        else:
            kept = results[results_read] + operands[reads] if saved else operands[reads]
        save(ctx, kept)
        if unsaved:
            like = ()
            if linear:
                x = operands[0]
                like = (x.dtype, x.shape) if linear == 1 else (x.dtype, x.shape, operands[1].shape)
            ctx.unsaved = like, operands[tensors:]
        if visible == 1:
            return results[0] if several else results
        ctx.mark_non_differentiable(*results[1:visible])
        return results[:visible]

    def backward(ctx, grad, *_):
        needs = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(needs)
        kept = ctx.saved_tensors
        like, numbers = ctx.unsaved if unsaved else ((), ())
        operands = [Like(shape, like[0]) for shape in like[1:]] if linear else []
        operands += kept[saved:]
        if len(operands) < tensors:  # the call left out trailing optional tensors
            operands += [None] * (tensors - len(operands))
        operands += numbers
        operands += defaults[len(operands) :]
        operands, results = named(Operands, operands), named(Saved, kept[:saved])
        gradients = op.composite_gradients if by_composite(grad) else op.gradients
        result = [None] * len(needs)
        try:
            computed = gradients(grad, needs, operands, results)
        except Exception as error:
            raise_cause(error)
            raise
        for i, d in zip(gradient_places, computed):
            if needs[i] and d is not None:
                x = operands[i]
                # (`sum_to` is tested first: Dynamo cannot compare a saved size with that of a tensor made from it)
                result[i] = sum_to(d, x.shape, x.dtype) if sum_to and d.shape != x.shape else d
        return tuple(result)

    # autograd names the node after the class: grad_fn=<MaskedMeanBackward>
    name = "".join(word.capitalize() for word in op.name.split("_"))
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)

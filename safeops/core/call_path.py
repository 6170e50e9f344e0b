"""How a call travels: from the public function's arguments to a kernel or the definition, and back through autograd."""

from typing import NamedTuple

import torch

from safeops.core import check
from safeops.core.library import raise_cause
from safeops.core.route import is_over_ranks, route

# (op, operands, whether the kernel takes such arguments) -> the results of a call on DTensors: safeops.distributed's.
call_over_ranks = None


class Like(NamedTuple):
    """Backward needs these of an operand in which the op is linear: there is no need to keep the tensor."""

    shape: torch.Size
    dtype: torch.dtype


def call_path(op):
    """The call path of an op. What no call changes is looked up here: an attribute costs each call 40 ns."""
    prepare, visible, hides = op.prepare, op.visible, op.returns > op.visible

    def call(*arguments):
        try:
            takes, operands = prepare(*arguments)
            calls = route(op, operands) if takes else None
            if calls is not None:
                run, traced = calls
                if traced:
                    op.validate(*arguments)
                results = run(*operands)
                if hides and type(results) is tuple:
                    return results[0] if visible == 1 else results[:visible]
                return results
        except Exception as error:
            check.explain(op.validate, *arguments)
            raise_cause(error)
            raise
        op.validate(*arguments)
        if is_over_ranks(operands[: op.tensors]):
            return call_over_ranks(op, operands, takes)
        return op.composite(*operands)

    return call


def autograd_function(op):
    """The autograd Function around an op's raw forward."""
    raw, reads, linear, tensors, visible, keep = op.forward, op.reads, op.linear, op.tensors, op.visible, op.keep
    by_composite, named, Operands, Saved = op.by_composite, op.named, op.Operands, op.Saved
    save, several, results_read, saved = op.save, op.returns > 1, op.saved, len(range(op.returns)[op.saved])
    chooses, sum_to, differentiable = op.keep is not None, op.sum_to, op.differentiable
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
        if len(operands) < tensors:  # trailing ones that were not given
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
        for i, d in zip(differentiable, computed):
            if needs[i] and d is not None:
                x = operands[i]
                # (asked only where it may be: Dynamo cannot compare a saved size with that of a tensor made of it)
                result[i] = sum_to(d, x.shape, x.dtype) if sum_to and d.shape != x.shape else d
        return tuple(result)

    # autograd names the node after the class: grad_fn=<MaskedMeanBackward>
    name = "".join(word.capitalize() for word in op.name.split("_"))
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)

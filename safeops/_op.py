"""One record per op, and what follows from it: the autograd Function, the call path, the composite, the public op.

A family is a subclass of `Op`, an op is an instance. The public function calls it with its own arguments: `prepare`
makes the raw op's operands of them, `_route.route` decides who computes, and `validate` explains what went wrong.
"""

import os
from typing import NamedTuple

import torch

from safeops import _check, _route, _torch, _verified
from safeops._library import declare_public, defaults, document, has_kernel
from safeops._symbolic import as_operand, symbolic

registry = {}  # every op by its public name


class Like(NamedTuple):
    """What backward needs of an operand in which the op is linear: there is no need to keep the tensor."""

    shape: torch.Size
    dtype: torch.dtype


class Op:
    """The record of a public op, and its call path.

    Places are those of the raw forward op's operands, whose tensors come first. A family, or an op, says:

    owner: whose kernel runs on CUDA, "C++/CUDA" or "Triton".
    differentiable: the places whose gradients the backward kernel computes.
    constant: the slice of operands whose gradient only the composite has.
    linear: the differentiable places that the results are linear in: backward reads only their shape and dtype.
    visible: how many of the raw forward's results the caller sees. The others are for backward.
    saved: which of the results are kept for backward.
    compiled: the device types whose kernel is kept under torch.compile. Elsewhere Inductor fuses the composite with
        its neighbours, which wins.
    """

    owner = "Triton"
    differentiable = (0,)
    constant = slice(0)
    linear = ()
    visible = 1
    saved = slice(1, None)
    compiled = ("cpu",)

    def __init__(self, name, forward, backward=None, definition=None, also=()):
        """forward, backward, also: the raw ops. definition: the composite, of the raw forward's operands."""
        self.name, self.forward, self.backward, self.definition = name, forward, backward, definition
        schema = _torch.schema(forward)
        self.raw = tuple(_torch.schema(op).name.removeprefix("safeops::") for op in (forward, backward, *also) if op)
        self.defaults = defaults(forward)
        self.several = len(schema.returns) > 1
        self.hides = self.several and self.visible == 1
        kinds = [str(x.type) for x in schema.arguments]
        self.numbers = tuple(i for i, kind in enumerate(kinds) if "float" in kind)
        self.tensors = sum("Tensor" in kind for kind in kinds)  # how many
        if self.differentiable:
            assert all("Tensor" in kind for kind in kinds[: self.tensors]), f"{name}: the tensors must come first"
        # The same two calls twice: as Dynamo traces them, and without their Python layers (a quarter of a small call).
        # The route has sent functorch, which those are for, to the composite.
        self.function = _function(self) if self.differentiable else None
        direct = self.function and _torch.direct_apply(self.function)
        # (function, whether it is Dynamo's): without a gradient to record, and with one
        plain, recorded = _torch.direct(forward), direct or _torch.direct(forward)
        self.eager = (plain, False), (recorded, False)
        self.traced = (self._trace_raw, True), (self._trace_apply if direct else self._trace_raw, True)
        self.cpu = all(has_kernel(name, "CPU") for name in self.raw)
        self.verified = _verified.record(name)
        # A kernel that no GPU has run is not the default.
        trusted = self.verified is not None or os.environ.get("SAFEOPS_UNVERIFIED") == "1"
        self.cuda = trusted and all(has_kernel(name, "CUDA") for name in self.raw)
        registry[name] = self

    # ---- what a family says

    def prepare(self, *arguments):
        """(whether the kernel takes such arguments, the raw op's operands). Trailing defaults are left out: each
        operand costs a small call 50 ns."""
        raise NotImplementedError

    def validate(self, *arguments):
        """Raise where the public function does not take these arguments."""
        raise NotImplementedError

    def gradients(self, grad, needs, operands, results):
        """Those of the differentiable operands, by the backward kernel; of broadcast ones before the sum."""
        raise NotImplementedError

    def composite_gradients(self, grad, needs, operands, results):
        """The same as a graph of their own, by the definition."""
        for i in self.linear:  # the derivative may be taken at 0
            zero = torch.zeros((), dtype=operands[i].dtype, device=grad.device)
            operands[i] = zero.expand(operands[i].shape).requires_grad_(needs[i])
        grads = _route.differentiable_backward(self.definition, operands, grad)
        return [grads[i] for i in self.differentiable]

    def keep(self, tensors, results):
        """(operands, results) that backward reads; None stands for an operand that it does not read."""
        if self.linear:
            tensors = [None if i in self.linear else x for i, x in enumerate(tensors)]
        return tensors, results[self.saved]

    # ---- call path

    def __call__(self, *arguments):
        try:
            takes, operands = self.prepare(*arguments)
            calls = _route.route(self, operands) if takes else None
            if calls is not None:
                run, traced = calls
                if traced:
                    self.validate(*arguments)
                results = run(*operands)
                return results[0] if self.hides and type(results) is tuple else results
        except Exception:
            _check.explain(self.validate, *arguments)
            raise
        self.validate(*arguments)
        return self.composite(*operands)

    def composite(self, *operands):
        first, operands = operands[0], (*operands, *self.defaults[len(operands) :])
        return self.definition(*[as_operand(x, first) if i in self.numbers else x for i, x in enumerate(operands)])

    # A raw op makes a constant of each number: where one is symbolic, Dynamo traces the definition.

    def _trace_raw(self, *operands):
        return (self.composite if self._symbolic(operands) else self.forward)(*operands)

    def _trace_apply(self, *operands):
        return (self.composite if self._symbolic(operands) else self.function.apply)(*operands)

    def _symbolic(self, operands):
        return any(i < len(operands) and symbolic(operands[i]) for i in self.numbers)

    # ---- public function

    def public(self, *schemas, arguments=""):
        """Decorator of the public function: registers it as `safeops::<op>`, one schema an overload.

        arguments: what the docstrings of a family share, in place of {arguments}.
        """

        def declare(function):
            document(function, arguments)
            declare_public(function, *(self.name + schema for schema in schemas))
            return function

        return declare


def _function(op):
    """The autograd Function around an op's raw forward."""
    count = op.tensors

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *operands):
            results = op.forward(*operands)
            results = results if op.several else (results,)
            ctx.set_materialize_grads(False)
            tensors, kept = op.keep(operands[:count], results)
            ctx.save_for_backward(*tensors, *kept)
            ctx.given, ctx.others = len(tensors), operands[count:]
            if op.linear:
                ctx.like = [(operands[i].shape, operands[i].dtype) for i in op.linear]
            if op.visible == 1:
                return results[0]
            ctx.mark_non_differentiable(*results[1 : op.visible])
            return results[: op.visible]

        @staticmethod
        def backward(ctx, grad, *_):
            needs = ctx.needs_input_grad
            found = [None] * len(needs)
            if grad is None:
                return tuple(found)
            saved, given = ctx.saved_tensors, ctx.given
            operands = [*saved[:given], *(None,) * (count - given), *ctx.others]
            operands += op.defaults[len(operands) :]
            if op.linear:
                for i, like in zip(op.linear, ctx.like):
                    operands[i] = Like(*like)
            gradients = op.composite_gradients if _route.by_composite(grad) else op.gradients
            for i, d in zip(op.differentiable, gradients(grad, needs, operands, saved[given:])):
                if i < len(needs) and needs[i]:
                    found[i] = sum_to(d, operands[i].shape, operands[i].dtype)
            return tuple(found)

    return Function


def sum_to(grad, shape, dtype):
    """A gradient of the full broadcast shape, summed to its operand's shape and narrowed once, at the end."""
    if grad.shape == shape:
        return grad
    lead = grad.dim() - len(shape)
    dims = [d for d in range(grad.dim()) if d < lead or shape[d - lead] != grad.shape[d]]
    if grad.is_complex():
        return torch.complex(*(sum_to(part, shape, part.dtype) for part in (grad.real, grad.imag)))
    # ours, not sum_to_size: aten's CPU sum depends on the number of threads
    return registry["masked_sum"](grad, None, dims, True, None, dtype, "zero").reshape(shape)

"""The skeleton of what an index names: one Function and one call path for safe_gather and safe_index_select."""

import torch

from safeops import _check, _route
from safeops._library import Op
from safeops.ops._selection import MOVABLE, as_double

# ---- autograd


def _function(raw, raw_backward, definition):
    class _Indexed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, dim, index, fill_value=0.0):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(index)
            ctx.arguments = (input.shape, dim)
            return raw(input, dim, index, fill_value)

        @staticmethod
        def backward(ctx, grad):
            nothing = (None,) * (len(ctx.needs_input_grad) - 1)
            if grad is None:
                return None, *nothing
            (index,), (shape, dim) = ctx.saved_tensors, ctx.arguments
            if grad.is_complex() or _route.by_composite(grad):
                # Linear in its input, so the derivative may be taken at 0.
                origin = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(shape).requires_grad_()
                return _route.differentiable_backward(definition, (origin, dim, index), grad)[0], *nothing
            return raw_backward(grad, dim, index, shape), *nothing

    return _Indexed


# ---- call path


class Indexed:
    def __init__(self, name, raw, raw_backward, definition, validate):
        function = _function(raw, raw_backward, definition)
        self.op = Op(name, (f"_{name}", f"_{name}_backward"), "C++/CUDA", raw, function, definition)
        self.validate = validate

    def call(self, input, dim, index, fill_value):
        try:
            kernel = _route.kernel(self.op, input, index) if input.dtype in MOVABLE else None
            fill = ()
            if kernel is not None:
                short = kernel is self.op.eager and dim.__class__ is int
                if not (short and fill_value.__class__ is int and fill_value == 0):  # (a trace keeps what it compares)
                    self.validate(input, dim, index, fill_value)
                    fill = as_double(fill_value)
            if kernel is not None and fill is not None:
                arguments = (input, dim, index, *fill)
                if torch.is_grad_enabled() and input.requires_grad:
                    return kernel.apply(*arguments)
                return kernel.raw(*arguments)
        except Exception:
            _check.explain(self.validate, input, dim, index, fill_value)
            raise
        self.validate(input, dim, index, fill_value)
        return self.op.composite(input, dim, index, fill_value)

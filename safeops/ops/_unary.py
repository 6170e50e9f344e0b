"""The skeleton of the unary functions: one definition, one pair of raw ops, one Function, one call path.

An op of the family is `Unary(name, function, ...)`: the function itself, where it has no value or slope (`absent`), and
what stands there. Saturation, dtypes, selection and the gradient that is exactly 0 over a stand-in are the skeleton's.
"""

import torch

from safeops import _check, _route
from safeops._dtypes import (
    FLOATING,
    HALF,
    LARGEST,
    compute_dtype,
    largest_like,
    overflows,
    saturate_tensor,
    to_one,
    wide_on_cpu,
)
from safeops._library import Op, declare_raw, like
from safeops._torch import is_autocast_available

# ---- definition

BENIGN = 0.5  # what a function is given in place of an operand it must not see: all of them are smooth there


def define(function, absent, stand_in, input, eps=None, fill_value=0.0, dtype=None):
    """`function(input)`; `stand_in` where `absent`, the largest finite number where the value does not fit `dtype`."""
    if dtype is None:
        dtype = input.dtype if input.is_floating_point() else torch.get_default_dtype()
    compute = compute_dtype(input.dtype, dtype)
    eps = floor(eps, compute)
    x = input.to(compute)
    fixed = x.detach()
    none = absent(fixed, eps)
    y = function(wide_on_cpu(torch.where(none, BENIGN, fixed)))
    over = overflows(y, dtype) & fixed.isfinite() & ~none
    instead = torch.where(over, largest_like(y, dtype), saturate_tensor(stand_in(fixed, eps, fill_value), dtype))
    true = ~(none | over)
    # Select before the function: a slope that does not exist or does not fit must not meet the gradient 0.
    y = function(wide_on_cpu(torch.where(true, x, BENIGN)))
    return torch.where(true, y.to(dtype), instead.to(dtype))


def lift(x):
    """(x s, s), where the power of two s brings a tiny x to [1, 2). There no derivative overflows, and the chain rule
    multiplies by s last: a gradient of 0 meets no infinity, in second derivatives either."""
    fixed = x.detach()
    s = torch.where((fixed > 0) & (fixed < 2.0**-20), to_one(fixed), 1)
    return x * s, s


def floor(eps, compute):
    """eps in the compute dtype: at least its smallest positive number, so that x == 0 is always below it."""
    info = torch.finfo(compute)
    if isinstance(eps, torch.Tensor):
        return eps.to(compute).clamp(min=info.tiny * info.eps)
    return info.tiny if eps is None else max(float(eps), info.tiny * info.eps)


# ---- op

_SCHEMA = "(Tensor input, float? eps=None, float fill_value=0.0, ScalarType? dtype=None) -> Tensor"
_SCHEMA_BACKWARD = "(Tensor grad, Tensor input, float? eps=None) -> Tensor"


def _fake(input, eps=None, fill_value=0.0, dtype=None):
    return like(input, input.shape, dtype or input.dtype)


def _fake_backward(grad, input, eps=None):
    return like(input, input.shape, input.dtype)


# ---- autograd


def _function(raw, raw_backward, definition):
    class _Unary(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, eps=None, fill_value=0.0, dtype=None):
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(input)
            ctx.arguments = (eps, fill_value, dtype)
            return raw(input, eps, fill_value, dtype)

        @staticmethod
        def backward(ctx, grad):
            nothing = (None,) * (len(ctx.needs_input_grad) - 1)
            if grad is None:
                return None, *nothing
            (input,) = ctx.saved_tensors
            if _route.by_composite(grad):
                return _route.differentiable_backward(definition, (input, *ctx.arguments), grad)[0], *nothing
            return raw_backward(grad, input, ctx.arguments[0]), *nothing

    return _Unary


# ---- call path


def output_dtype(input, promoted):
    if promoted not in HALF:
        return promoted
    device = input.device.type
    if is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.float32  # as torch's own autocast does for log, exp and pow
    return promoted


class Unary:
    """A unary function: declares the raw ops, and is the call path of the public function.

    function: differentiable torch code, right to second order wherever `absent` is False and the value fits.
    absent(x, eps): where it is not to be called. stand_in(x, eps, fill_value): the value there.
    positive: eps must be greater than 0, and finite.
    """

    def __init__(self, name, function, absent, stand_in, positive=False):
        self.name, self.positive = name, positive

        def definition(input, eps=None, fill_value=0.0, dtype=None):
            return define(function, absent, stand_in, input, eps, fill_value, dtype)

        raw = declare_raw(f"_{name}", _SCHEMA, fake=_fake, composite=definition)
        raw_backward = declare_raw(f"_{name}_backward", _SCHEMA_BACKWARD, fake=_fake_backward)
        autograd = _function(raw, raw_backward, definition)
        self.op = Op(name, (f"_{name}", f"_{name}_backward"), "C++/CUDA", raw, autograd, definition)

    def call(self, input, eps=None, fill_value=0.0, dtype=None):
        try:
            own = input.dtype  # (read once: a small call is a few dozen such reads)
            kernel = _route.kernel(self.op, input) if own in FLOATING else None
            if kernel is not None:
                if eps is not None or fill_value.__class__ is not float or kernel is self.op.traced:
                    self._validate(input, eps, fill_value, dtype)
                if dtype is None:
                    dtype = output_dtype(input, own)
                elif dtype.__class__ is not torch.dtype:  # the dispatcher would take a number for one
                    self._validate(input, eps, fill_value, dtype)
                arguments = (input,)
                if eps is not None or fill_value != 0 or dtype != own:
                    arguments = (input, eps, fill_value, dtype)
                if input.requires_grad and torch.is_grad_enabled():
                    return kernel.apply(*arguments)
                return kernel.raw(*arguments)
        except Exception:
            _check.explain(self._validate, input, eps, fill_value, dtype)
            raise
        self._validate(input, eps, fill_value, dtype)
        if dtype is None:
            dtype = output_dtype(input, input.dtype if input.is_floating_point() else torch.get_default_dtype())
        return self.op.composite(input, eps, fill_value, dtype)

    def _validate(self, input, eps, fill_value, dtype):
        _check.real(self.name, "input", input)
        if eps is not None:
            limits = {"above": 0, "maximum": LARGEST} if self.positive else {"minimum": 0}
            _check.number(self.name, "eps", eps, **limits)
        _check.number(self.name, "fill_value", fill_value)
        _check.output_dtype(self.name, dtype)

"""Shared by the unary functions.

An op of the family is `Unary(name, function, absent, stand_in)`: the function, the condition where it has no value or
slope, and the result there. The family handles saturation, dtypes, selection, and the gradient: 0 at a stand-in.
"""

import torch

from safeops.core import check
from safeops.core.dtypes import (
    FLOATING,
    HALF,
    LARGEST,
    WIDE,
    compute_dtype,
    largest_like,
    overflows,
    saturate_tensor,
    to_one,
    wide,
)
from safeops.core.library import declare_raw, like
from safeops.core.op import Op
from safeops.core.private_torch import is_autocast_available

# ---- definition

BENIGN = 0.5  # replaces operands that a function must not see: every function of the family is smooth there


def define(function, absent, stand_in, input, eps=None, fill_value=0.0, dtype=None):
    """`function(input)`; `stand_in` where `absent` is True; dtype's largest number where a value overflows `dtype`."""
    if dtype is None:
        dtype = input.dtype if input.is_floating_point() else torch.get_default_dtype()
    compute = compute_dtype(input.dtype, dtype)
    eps = floor(eps, compute)
    x = input.to(compute)
    fixed = x.detach()
    none = absent(fixed, eps)
    y = function(wide(torch.where(none, BENIGN, fixed)))
    over = overflows(y, dtype) & fixed.isfinite() & ~none
    instead = torch.where(over, largest_like(y, dtype), saturate_tensor(stand_in(fixed, eps, fill_value), dtype))
    true = ~(none | over)
    # Select before the function: a slope that does not exist or does not fit must not be multiplied by a gradient of 0.
    y = function(wide(torch.where(true, x, BENIGN)))
    return torch.where(true, y.to(dtype), instead.to(dtype))


def lift(x):
    """Returns (x s, s). s is the power of two that brings a tiny x, 0 < x < 2^-20, to [1, 2); for other x it is 1. No
    first or second derivative at x s overflows, and the chain rule multiplies by s last: so no upstream gradient of 0
    is multiplied by inf."""
    fixed = x.detach()
    s = torch.where((fixed > 0) & (fixed < 2.0**-20), to_one(fixed), 1)
    return x * s, s


def floor(eps, compute):
    """eps in the compute dtype, at least that dtype's smallest positive number: x == 0 is always below eps."""
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


# ---- record


def output_dtype(input, promoted):
    if promoted not in HALF:
        return promoted
    device = input.device.type
    if is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.float32  # as torch's own autocast does for log, exp and pow
    return promoted


class Unary(Op):
    """The record of a unary function.

    function: torch code, differentiable twice wherever `absent` is False and the value fits.
    absent(x, eps): bool, True where function must not be called. stand_in(x, eps, fill_value): the result there.
    positive: True if eps must be greater than 0 and at most fp32's largest number.
    """

    owner = "C++/CUDA"
    shards = "elementwise"

    def __init__(self, name, function, absent, stand_in, positive=False, domain=None):
        def definition(input, eps=None, fill_value=0.0, dtype=None):
            return define(function, absent, stand_in, input, eps, fill_value, dtype)

        forward = declare_raw(f"_{name}", _SCHEMA, fake=_fake, composite=definition)
        backward = declare_raw(f"_{name}_backward", _SCHEMA_BACKWARD, fake=_fake_backward)
        self.positive, self.domain = positive, domain
        super().__init__(name, forward, backward, definition)

    def prepare(self, input, eps=None, fill_value=0.0, dtype=None):
        input_dtype = input.dtype  # (read once: such reads are most of a small call's time)
        usual = fill_value.__class__ is float and check.usual_floor(eps)
        if usual and fill_value == 0 and input_dtype in WIDE and dtype in (None, input_dtype):
            return True, (input,) if eps is None else (input, eps)  # most calls
        takes = input_dtype in FLOATING
        if not usual:
            self.validate(input, eps, fill_value, dtype)
        if dtype is None:
            dtype = output_dtype(input, input_dtype if takes else torch.get_default_dtype())
        elif dtype.__class__ is not torch.dtype:  # the dispatcher would accept an int
            self.validate(input, eps, fill_value, dtype)
        return takes, (input, eps, fill_value, dtype)

    def validate(self, input, eps=None, fill_value=0.0, dtype=None):
        check.real(self.name, "input", input)
        if eps is not None:
            limits = {"above": 0, "maximum": LARGEST} if self.positive else {"minimum": 0}
            check.number(self.name, "eps", eps, **limits)
        check.number(self.name, "fill_value", fill_value)
        check.output_dtype(self.name, dtype)

    def gradients(self, grad, needs, operands, results):
        return (self.backward(grad, operands.input, operands.eps),)

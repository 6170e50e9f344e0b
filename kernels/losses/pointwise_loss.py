"""A pointwise loss from its functors, in registers.

    value(x, y, *parameters)    the loss of one element
    slope(x, y, *parameters)    its derivative by x, of a loss of x - y: that by y is the negative
    slopes(x, y, *parameters)   both derivatives, of any other loss

A loss with flags gives a dict in place of value, {flags: (value, slopes)}: they come first among the parameters. One
that is `flat` in places has no gradient there, whatever comes in.

x, y and the parameters, which stand in the order of the raw op's schema, come in the compute dtype, the parameters as
(1, 1) tiles. A functor must let NaN through: clamp with comparisons, not with tl.minimum or tl.maximum.
"""

import torch

from ..engine.elementwise import BOTH, DIFFERENCE, FLAT, elementwise
from ..engine.launch import common_shape, like
from ..engine.sums import weighted_sum


def pointwise_loss(name, value, slope=None, slopes=None, flat=False):
    """(forward, backward): the launchers of `_<name>` and `_<name>_backward`, with the arguments of their schemas."""
    formulas = value if isinstance(value, dict) else {(): (value, slopes or slope)}
    flags = len(next(iter(formulas)))
    kind = DIFFERENCE if slope else FLAT if flat else BOTH

    def forward(input, target, mask, weight, denominator, reduction, *options):
        *parameters, empty_nan, divisor = options
        value, _ = formulas[tuple(parameters[:flags])]
        parameters = parameters[flags:]
        dtype = torch.float64 if torch.float64 in (input.dtype, target.dtype) else torch.float32
        if reduction == 0:
            out = like(input, common_shape(input, target), dtype)
            elementwise(name, value, (input, target, mask, weight, None, None, out, None), parameters)
            return out, torch.empty(0, dtype=torch.float64, device=input.device)
        mean, dim, keepdim = reduction == 1, None, False
        return weighted_sum(
            name, value, input, target, mask, weight, denominator, divisor,
            dim, keepdim, mean, parameters, empty_nan, dtype,
        )  # fmt: skip

    def backward(grad, denominator, input, target, mask, weight, *options):
        *parameters, need_input, need_target, input_dtype, target_dtype = options
        _, derivative = formulas[tuple(parameters[:flags])]
        shape = common_shape(input, target)
        input_dtype, target_dtype = input_dtype or input.dtype, target_dtype or target.dtype
        dx = like(input, shape, input_dtype) if need_input else None
        dy = like(target, shape, target_dtype) if need_target else None
        tensors = (input, target, mask, weight, grad, denominator, dx, dy)
        elementwise(name + "_backward", derivative, tensors, parameters[flags:], kind)
        return (
            dx if need_input else torch.empty(0, dtype=input_dtype, device=input.device),
            dy if need_target else torch.empty(0, dtype=target_dtype, device=input.device),
        )

    forward.__name__ = forward.__qualname__ = name
    backward.__name__ = backward.__qualname__ = name + "_backward"
    return forward, backward

"""Makes the launchers of a pointwise loss from its functors, which work on registers.

    value(x, y, *parameters)    the loss of one element
    slope(x, y, *parameters)    df/dx of a loss that depends on x - y alone: df/dy = -df/dx
    slopes(x, y, *parameters)   (df/dx, df/dy), for any other loss

The functors of a loss of three tensors take (x, y, z, *parameters). A loss with flags passes a dict {flags: (value,
slopes)} as value; its flags are its first parameters. If the third tensor is optional, its presence is the first flag,
and without it the functors take (x, y). If a loss is `flat`, a slope of 0 gives gradient 0, even for an upstream NaN.

Operands and parameters come in the compute dtype, the parameters as (1, 1) tiles, in the order of the raw op's schema.
A functor must let NaN through: clamp with comparisons, not with tl.minimum or tl.maximum.
"""

import torch

from ..engine.buffers import empty
from ..engine.elementwise import ALL_SLOPES, DIFFERENCE, FLAT, elementwise
from ..engine.sums import weighted_sum
from ..engine.tensors import common_shape, like


def pointwise_loss(
    name, value, slope=None, slopes=None, flat=False, count=2, optional=False, flags_of=None, parameters_of=None
):
    """Returns (forward, backward): the launchers of `_<name>` and `_<name>_backward`, with their schemas' arguments.

    count: how many tensors the loss has. optional: the last of them may be None. flags_of(*parameters): the flags,
    where they are not the first parameters. parameters_of(*parameters): the functors' parameters, computed in fp64, so
    that 1 - p keeps its digits."""
    formulas = value if isinstance(value, dict) else {(): (value, slopes or slope)}
    flags = 0 if flags_of else len(next(iter(formulas))) - optional
    kind = DIFFERENCE if slope else FLAT if flat else ALL_SLOPES

    def chosen(tensors, parameters):
        """Returns ((value, derivative), the parameters that they take)."""
        has_last = (tensors[-1] is not None,) * optional
        chosen_flags = flags_of(*parameters) if flags_of else parameters[:flags]
        parameters = parameters[flags:]
        return formulas[(*has_last, *chosen_flags)], parameters_of(*parameters) if parameters_of else parameters

    def forward(*arguments):
        tensors = arguments[:count]
        mask, weight, denominator, reduction, *parameters, empty_nan, divisor = arguments[count:]
        (value, _), parameters = chosen(tensors, parameters)
        if reduction == 0:
            operands = [x for x in tensors if x is not None]
            dtype = torch.float64 if any(x.dtype == torch.float64 for x in operands) else torch.float32
            out = like(operands[0], common_shape(*operands), dtype)
            three = (*tensors, None)[:3]
            elementwise(name, value, (*three, mask, weight, None, None, out, None, None), parameters)
            return out, empty((0,), torch.float64, out.device)
        return weighted_sum(
            name, value, tensors, mask, weight, denominator, divisor, None, False, reduction == 1, parameters, empty_nan
        )

    def backward(grad, denominator, *arguments):
        tensors, (mask, weight, *options) = arguments[:count], arguments[count:]
        parameters, needs, dtypes = options[: -2 * count], options[-2 * count : -count], options[-count:]
        (_, derivative), parameters = chosen(tensors, parameters)
        shape, input = common_shape(*(x for x in tensors if x is not None)), tensors[0]
        results = []
        for x, need, dtype in zip((x if x is not None else input for x in tensors), needs, dtypes):
            dtype = dtype or x.dtype
            results.append(like(x, shape, dtype) if need else empty((0,), dtype, input.device))
        three, outputs = (*tensors, None)[:3], [d if need else None for d, need in zip(results, needs)]
        operands = (*three, mask, weight, grad, denominator, *outputs, *[None] * (3 - count))
        elementwise(name + "_backward", derivative, operands, parameters, kind)
        return tuple(results)

    forward.__name__ = forward.__qualname__ = name
    backward.__name__ = backward.__qualname__ = name + "_backward"
    return forward, backward

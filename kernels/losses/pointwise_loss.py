"""A pointwise loss from two functions of d = x - y, in registers: its value and its derivative.

They take p0 and p1 as (1, 1) tiles of the compute dtype, and must let NaN through: clamp with comparisons, not with
tl.minimum or tl.maximum.
"""

import torch

from ..engine.elementwise import launch_map, map_backward
from ..engine.launch import common_shape, like
from ..engine.reduce import reduce


def pointwise_loss(name, value, derivative):
    """(forward, backward) launchers with the signatures of _<loss> and _<loss>_backward."""

    def forward(input, target, mask, weight, denominator, reduction, *options):
        *parameters, empty_nan, divisor = options
        p0, p1 = (*parameters, 0.0, 0.0)[:2]
        dtype = torch.float64 if torch.float64 in (input.dtype, target.dtype) else torch.float32
        if reduction == 0:
            out = like(input, common_shape(input, target), dtype)
            compute = torch.float64 if weight is not None and weight.dtype == torch.float64 else dtype
            launch_map(name, value, (input, target, mask, weight, None, None, out, None), p0, p1, compute)
            return out, torch.empty(0, dtype=torch.float64, device=input.device)
        mean, dim, keepdim = reduction == 1, None, False
        return reduce(
            name, value, input, target, mask, weight, denominator, divisor,
            dim, keepdim, mean, p0, p1, empty_nan, dtype,
        )  # fmt: skip

    def backward(grad, denominator, input, target, mask, weight, *options):
        *parameters, need_input, need_target, input_dtype, target_dtype = options
        p0, p1 = (*parameters, 0.0, 0.0)[:2]
        shape = common_shape(input, target)
        input_dtype, target_dtype = input_dtype or input.dtype, target_dtype or target.dtype
        dx = like(input, shape, input_dtype) if need_input else None
        dy = like(target, shape, target_dtype) if need_target else None
        map_backward(
            name + "_backward", derivative, input, target, mask, weight, grad, denominator, dx, dy, p0, p1
        )  # fmt: skip
        return (
            dx if need_input else torch.empty(0, dtype=input_dtype, device=input.device),
            dy if need_target else torch.empty(0, dtype=target_dtype, device=input.device),
        )

    forward.__name__ = forward.__qualname__ = name
    backward.__name__ = backward.__qualname__ = name + "_backward"
    return forward, backward

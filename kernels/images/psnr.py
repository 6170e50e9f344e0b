"""psnr of each image: -10 log10 of the mean of ((x - y) / data_range)^2, in fp64, where no square of an fp32 number
overflows or vanishes. Its gradient is dx = -20 / ln 10 (x - y) / sum (x - y)^2.
"""

import torch
import triton
import triton.language as tl

from ..engine.buffers import empty
from ..engine.elementwise import DIFFERENCE, elementwise
from ..engine.sums import weighted_sum
from ..engine.tensors import like
from ..losses.mse_loss import value

DECIBELS = tl.constexpr(-4.342944819032518)  # per unit of the natural logarithm of a mean square: -10 / ln 10


@triton.jit
def square(x, y, unit):
    return value(x, y) * (unit * unit)


@triton.jit
def decibels(total, count):
    """Returns (decibels, sum of squares). Without pixels the sum is -1, by which the backward can divide."""
    return DECIBELS * tl.log(total / count), tl.where(count > 0, total, -1.0)


@triton.jit
def slope(x, y):
    return (x - y) * (2 * DECIBELS)


def psnr(input, target, mask=None, data_range=1.0):
    dims, parameters = tuple(range(1, input.dim())), (1 / data_range,)
    return weighted_sum(
        "psnr", square, (input, target), mask, None, None, None, dims, False, False, parameters, False, torch.float32,
        decibels,
    )  # fmt: skip


def psnr_backward(grad, input, target, divisor, mask=None, need_input=True, need_target=True):
    results = [like(x, x.shape, x.dtype) if need else empty((0,), x.dtype, x.device)
               for x, need in ((input, need_input), (target, need_target))]  # fmt: skip
    outputs = [d if need else None for d, need in zip(results, (need_input, need_target))]
    elementwise(
        "psnr_backward", slope, (input, target, None, mask, None, grad, divisor, *outputs, None), (), DIFFERENCE
    )
    return tuple(results)

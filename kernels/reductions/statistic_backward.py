"""The backward of every statistic: dx = keep ? (grad * scale) * w * shape(x, origin) : 0.

A functor gives c * shape. It takes x, the origin as the sum of two numbers (in fp64 the second is 0), and c. Those that
compare select c and do not multiply it by 0: a NaN or inf from upstream stays with the extreme.
"""

import torch
import triton
import triton.language as tl

from ..engine.elementwise import BY_WEIGHT, UNWEIGHTED, scaled_backward
from ..engine.reduce import reduced_dims


@triton.jit
def linear(x, origin, rest, c):
    return ((x - origin) - rest) * c


@triton.jit
def equal(x, origin, rest, c):
    return tl.where((x == origin) | ((x != x) & (origin != origin)), c, 0.0)


@triton.jit
def exponential(x, origin, rest, c):
    return tl.exp((x - origin) - rest) * c


@triton.jit
def sign(x, origin, rest, c):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x)) * c  # 0 at 0, NaN at NaN


@triton.jit
def sign_of_equal(x, origin, rest, c):
    return equal(tl.abs(x), origin, rest, sign(x, origin, rest, c))


KINDS = (linear, equal, exponential, sign, sign_of_equal)
MASKING = (equal, sign_of_equal)  # where the weight counts only as a mask


def statistic_backward(
    grad, input, origin, scale, mask=None, weight=None, kind=0, dim=None, keepdim=False
):  # fmt: skip
    if not keepdim:  # put the reduced dimensions back, each of size 1
        for d, gone in enumerate(reduced_dims(input.shape, dim)):
            if gone:
                grad, origin, scale = (t.unsqueeze(d) for t in (grad, origin, scale))
    out = torch.empty_like(input)
    shape = KINDS[kind]
    scaled_backward(
        "statistic_backward", shape, input, origin, mask, weight, grad, scale, out,
        UNWEIGHTED if shape in MASKING else BY_WEIGHT,
    )  # fmt: skip
    return out

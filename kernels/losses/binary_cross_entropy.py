"""binary_cross_entropy: f = -(y log x + (1 - y) log(1 - x)), logarithms of at least -100."""

import triton
import triton.language as tl

from .logistic import at_least
from .pointwise_loss import pointwise_loss


@triton.jit
def logarithms(x):
    """log x and log(1 - x). What 1 - x loses, it loses near 1: there 2 - u is its reciprocal."""
    u = 1 - x
    miss = tl.log(u) + ((1 - u) - x) * (2 - u)
    return at_least(tl.log(x), -100.0), at_least(miss, -100.0)


@triton.jit
def value(x, y):
    hit, miss = logarithms(x)
    return -(y * hit + (1 - y) * miss)


@triton.jit
def slopes(x, y):
    hit, miss = logarithms(x)
    return (x - y) / at_least(x * (1 - x), x * 0 + 1e-12), miss - hit


binary_cross_entropy, binary_cross_entropy_backward = pointwise_loss("binary_cross_entropy", value, slopes=slopes)

"""binary_cross_entropy: f = -(y log x + (1 - y) log(1 - x)), logarithms of at least -100."""

import triton
import triton.language as tl

from ..engine.math import log_unit
from .logistic import at_least
from .pointwise_loss import pointwise_loss


@triton.jit
def logarithms(x):
    """log x and log(1 - x); the first is NaN of an x outside [0, 1]."""
    u = 1 - x
    hit, miss = tl.maximum(log_unit(x), -100.0), tl.maximum(log_unit(u, (1 - u) - x), -100.0)
    return tl.where(x * u >= 0, hit, float("nan")), miss


@triton.jit
def value(x, y):
    hit, miss = logarithms(x)
    return -(y * hit + (1 - y) * miss)


@triton.jit
def slopes(x, y):
    hit, miss = logarithms(x)
    return (x - y) / at_least(x * (1 - x), x * 0 + 1e-12), miss - hit


binary_cross_entropy, binary_cross_entropy_backward = pointwise_loss("binary_cross_entropy", value, slopes=slopes)

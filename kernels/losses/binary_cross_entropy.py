"""binary_cross_entropy: f = -(y log x + (1 - y) log(1 - x)), where each logarithm is at least -100.

v is the smaller of x and 1 - x. log v is the GPU's own logarithm; log(1 - v) is a polynomial (log1p in fp64)."""

import triton
import triton.language as tl

from ..engine.math import log1p, log_apart, polynomial
from .logistic import at_least
from .pointwise_loss import pointwise_loss

# log(1 - v) / v as a polynomial in v, for 0 <= v <= 1/2, fitted for the least relative error, 2e-7
LARGE = tl.constexpr((-1.0, -0.50002462, -0.33212924, -0.26966283, -0.050824332, -0.75161403, 1.0361639, -1.1606119))


@triton.jit
def logarithms(x):
    """Returns (x < 1/2, the logarithm of the smaller of x and 1 - x, that of the larger). The former logarithm is NaN
    for x outside [0, 1]."""
    low = x < 0.5
    v = tl.where(low, x, 1 - x)
    large = log1p(-v) if x.dtype == tl.float64 else v * polynomial(v, LARGE, 7)
    return low, at_least(log_apart(v), -100.0), large


@triton.jit
def value(x, y):
    low, small, large = logarithms(x)
    z = 1 - y
    return -(tl.where(low, y, z) * small + tl.where(low, z, y) * large)


@triton.jit
def slopes(x, y):
    low, small, large = logarithms(x)
    dy = large - small
    return (x - y) / at_least(x * (1 - x), x * 0 + 1e-12), tl.where(low, dy, -dy)


binary_cross_entropy, binary_cross_entropy_backward = pointwise_loss("binary_cross_entropy", value, slopes=slopes)

"""log_cosh_loss: f = log cosh(a), a = |x - y|. Far from 0 it is a - log 2 + log(1 + e^-2a). Near 0 it is a series in
a^2, or in fp64, where that would be long, log(1 + (1 - e)^2 / (2 e)), e = e^-a."""

import triton
import triton.language as tl

from ..engine.math import LOG_2, expm1_nonpositive, log1p_unit, polynomial
from .pointwise_loss import pointwise_loss

# log cosh(a) / a^2 in powers of a^2, for a <= 1, fitted for the least relative error, 1e-7
SERIES = tl.constexpr((0.5, -0.083330937, 0.02218676, -0.0065721930, 0.0017985851, -0.00030143265))


@triton.jit
def value(x, y):
    a = tl.abs(x - y)
    if x.dtype == tl.float64:
        less = -expm1_nonpositive(-a)
        e = 1 - less
        near = a < LOG_2
        tail = log1p_unit(tl.where(near, less * less / (2 * e), e * e))
        return tl.where(near, 0.0, a - LOG_2) + tail  # NaN is far, and stays
    else:
        square = a * a
        return tl.where(a < 1, square * polynomial(square, SERIES, 5), a - LOG_2 + log1p_unit(tl.exp(-2 * a)))


@triton.jit
def slope(x, y):  # tanh(x - y)
    less = -expm1_nonpositive(-2 * tl.abs(x - y))
    q = less / (2 - less)
    return tl.where(x < y, -q, q)


log_cosh_loss, log_cosh_loss_backward = pointwise_loss("log_cosh_loss", value, slope)

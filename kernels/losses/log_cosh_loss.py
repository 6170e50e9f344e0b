"""log_cosh_loss: a = |x - y|, e = e^-a; a < log 2: log(1 + (1 - e)^2 / (2 e)), else a - log 2 + log(1 + e^2)."""

import triton
import triton.language as tl

from ..engine.math import LOG_2, expm1_below, log1p_unit
from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y):
    a = tl.abs(x - y)
    less = -expm1_below(-a)
    e = 1 - less
    far = tl.where(a < LOG_2, 0.0, a - LOG_2)  # NaN too, which stays
    return far + log1p_unit(tl.where(a < LOG_2, less * less / (2 * e), e * e))


@triton.jit
def slope(x, y):  # tanh(x - y)
    less = -expm1_below(-2 * tl.abs(x - y))
    q = less / (2 - less)
    return tl.where(x < y, -q, q)


log_cosh_loss, log_cosh_loss_backward = pointwise_loss("log_cosh_loss", value, slope)

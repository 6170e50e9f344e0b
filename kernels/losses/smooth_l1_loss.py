"""smooth_l1_loss: with d = x - y and q = min(|d|, beta), f = q^2 / (2 beta) + |d| - q. For beta = 0, or a subnormal
beta, it is l1_loss."""

import triton
import triton.language as tl

from .pointwise_loss import pointwise_loss


@triton.jit
def normal(beta):
    return tl.where(beta < (2.0**-1022 if beta.dtype == tl.float64 else 2.0**-126), 0.0, beta)


@triton.jit
def value(x, y, beta):
    beta = normal(beta)
    a = tl.abs(x - y)
    q = tl.where(a > beta, beta, a)
    # q / beta is at most 1, where q^2 could underflow; beta = 0 leaves q = 0
    return 0.5 * q * (q / tl.where(beta > 0, beta, 1.0)) + (a - q)


@triton.jit
def slope(x, y, beta):
    d, beta = x - y, normal(beta)
    # clamp(d / beta, -1, 1), and sign(d) for beta = 0: then only 0 and NaN reach the division
    return tl.where(d > beta, 1.0, tl.where(d < -beta, -1.0, d / tl.where(beta > 0, beta, 1.0)))


smooth_l1_loss, smooth_l1_loss_backward = pointwise_loss("smooth_l1_loss", value, slope)

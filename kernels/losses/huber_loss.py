"""huber_loss: with d = x - y and q = min(|d|, delta), f = q^2 / 2 + delta (|d| - q)."""

import triton
import triton.language as tl

from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y, delta):
    a = tl.abs(x - y)
    q = tl.where(a > delta, delta, a)
    return 0.5 * q * q + delta * (a - q)


@triton.jit
def slope(x, y, delta):
    d = x - y
    return tl.where(d > delta, delta, tl.where(d < -delta, -delta, d))  # clamp(d, -delta, delta)


huber_loss, huber_loss_backward = pointwise_loss("huber_loss", value, slope)

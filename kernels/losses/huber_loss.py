"""huber_loss: with q = min(|d|, delta), f(d) = q^2 / 2 + delta (|d| - q)."""

import triton
import triton.language as tl

from .pointwise_loss import pointwise_loss


@triton.jit
def value(d, delta, p1):
    a = tl.abs(d)
    q = tl.where(a > delta, delta, a)
    return 0.5 * q * q + delta * (a - q)


@triton.jit
def grad(d, delta, p1):
    return tl.where(d > delta, delta, tl.where(d < -delta, -delta, d))  # clamp(d, -delta, delta)


huber_loss, huber_loss_backward = pointwise_loss("huber_loss", value, grad)

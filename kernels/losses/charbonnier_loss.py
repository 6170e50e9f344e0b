"""charbonnier_loss: with d = x - y, and h, l the larger and the smaller of |d| and eps, f = h sqrt(1 + (l / h)^2)."""

import triton
import triton.language as tl

from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y, eps):
    a = tl.abs(x - y)
    h = tl.where(a > eps, a, eps)
    q = tl.where(a > eps, eps, a) / h  # NaN stays NaN
    return h * tl.sqrt(1 + q * q)


@triton.jit
def slope(x, y, eps):
    d = x - y
    far = tl.abs(d) > eps
    s = tl.where(far, tl.where(d > 0, 1.0, -1.0), d / eps)
    q = tl.where(far, eps / tl.abs(d), s)
    return s / tl.sqrt(1 + q * q)


charbonnier_loss, charbonnier_loss_backward = pointwise_loss("charbonnier_loss", value, slope)

"""l1_loss: f = |x - y|."""

import triton
import triton.language as tl

from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y):
    return tl.abs(x - y)


@triton.jit
def slope(x, y):
    d = x - y
    return tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))  # 0 at 0, NaN at NaN


l1_loss, l1_loss_backward = pointwise_loss("l1_loss", value, slope)

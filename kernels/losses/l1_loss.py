"""l1_loss: f(d) = |d|."""

import triton
import triton.language as tl

from .pointwise_loss import pointwise_loss


@triton.jit
def value(d, p0, p1):
    return tl.abs(d)


@triton.jit
def grad(d, p0, p1):
    return tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, d))  # 0 at 0, NaN at NaN


l1_loss, l1_loss_backward = pointwise_loss("l1_loss", value, grad)

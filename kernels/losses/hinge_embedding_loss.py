"""hinge_embedding_loss: f = x for y = 1, max(margin - x, 0) for y = -1, their sum for any other y; y - y keeps NaN."""

import triton
import triton.language as tl

from .logistic import at_least
from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y, margin):
    return tl.where(y == -1, 0.0, x) + tl.where(y == 1, 0.0, at_least(margin - x, 0.0)) + (y - y)


@triton.jit
def slopes(x, y, margin):
    dx = tl.where(y == -1, 0.0, 1.0) - tl.where((y == 1) | (margin <= x), 0.0, 1.0)
    return dx, dx * 0


hinge_embedding_loss, hinge_embedding_loss_backward = pointwise_loss(
    "hinge_embedding_loss", value, slopes=slopes, flat=True
)

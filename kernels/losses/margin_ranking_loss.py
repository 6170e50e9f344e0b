"""margin_ranking_loss: f = max(margin - z (x - y), 0): x is to be the larger where z = 1, y where z = -1."""

import triton
import triton.language as tl

from .logistic import at_least
from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y, z, margin):
    return at_least(margin - z * (x - y), 0.0)


@triton.jit
def slopes(x, y, z, margin):
    flat = margin - z * (x - y) <= 0
    return tl.where(flat, 0.0, -z), tl.where(flat, 0.0, z), tl.where(flat, 0.0, y - x)


margin_ranking_loss, margin_ranking_loss_backward = pointwise_loss(
    "margin_ranking_loss", value, slopes=slopes, flat=True, count=3
)

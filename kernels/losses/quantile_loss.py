"""quantile_loss: with d = x - y, f = (1 - quantile) d where d > 0, and quantile |d| elsewhere."""

import triton
import triton.language as tl

from .logistic import product
from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y, over, under):
    d = x - y
    return product(tl.where(d > 0, over, under), tl.abs(d))


@triton.jit
def slope(x, y, over, under):
    d = x - y
    return tl.where(d > 0, over, tl.where(d < 0, -under, d))  # 0 stays 0, and NaN stays NaN


quantile_loss, quantile_loss_backward = pointwise_loss(
    "quantile_loss", value, slope, parameters_of=lambda quantile: (1 - quantile, quantile)
)

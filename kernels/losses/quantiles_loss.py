"""quantile_loss with a quantile z for each prediction: NaN for z outside of [0, 1]."""

import triton
import triton.language as tl

from .logistic import product, product_slope
from .pointwise_loss import pointwise_loss


@triton.jit
def bounded(z):
    return tl.where((z >= 0) & (z <= 1), z, float("nan"))


@triton.jit
def value(x, y, z):
    under = bounded(z)
    return product(tl.where(x > y, 1 - under, under), tl.abs(x - y))


@triton.jit
def slopes(x, y, z):
    d, under = x - y, bounded(z)
    share = tl.where(d > 0, 1 - under, under)
    none = share - share  # 0, or NaN where z is not in [0, 1]
    slope = tl.where(d > 0, share, tl.where(d < 0, -share, d + none))  # 0 stays 0, and NaN stays NaN
    return slope, -slope, product_slope(share, -d) + none


quantiles_loss, quantiles_loss_backward = pointwise_loss("quantiles_loss", value, slopes=slopes, count=3)

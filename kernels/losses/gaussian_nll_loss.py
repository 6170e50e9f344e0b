"""gaussian_nll_loss: f = (log v + d^2 / v) / 2, d = x - y, v = max(z, eps), NaN for z < 0; full: + log(2 pi) / 2."""

import triton
import triton.language as tl

from ..engine.math import log_any
from .logistic import at_least
from .pointwise_loss import pointwise_loss

HALF_LOG_2_PI = tl.constexpr(0.9189385332046727)


@triton.jit
def variance(z, eps):
    return tl.where(z < 0, float("nan"), at_least(z, eps))


@triton.jit
def value(x, y, z, eps):
    d, v = x - y, variance(z, eps)
    return (log_any(v) + d * (d / v)) * 0.5  # d / v first: d^2 alone may overflow


@triton.jit
def full(x, y, z, eps):
    return value(x, y, z, eps) + HALF_LOG_2_PI


@triton.jit
def slopes(x, y, z, eps):
    d, v = x - y, variance(z, eps)
    slope = d / v
    return slope, -slope, (1 - d * slope) / v * 0.5


FORMULAS = {(False,): (value, slopes), (True,): (full, slopes)}

gaussian_nll_loss, gaussian_nll_loss_backward = pointwise_loss("gaussian_nll_loss", FORMULAS, count=3)

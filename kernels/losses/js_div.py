"""js_div: s = x + y, u = |x - y| / s, f = s/4 ((1 + u) log(1 + u) + (1 - u) log(1 - u)).

Where u is small, as s/4 (log(1 - u^2) + u log(1 + 2 u / (1 - u))), whose terms hardly cancel."""

import triton
import triton.language as tl

from ..engine.math import log1p
from .logistic import product
from .pointwise_loss import pointwise_loss


@triton.jit
def apart(x, y):
    s = x + y
    return (x - y) / tl.where(s == 0, s + 1, s)


@triton.jit
def value(x, y):
    u = tl.abs(apart(x, y))
    near = u < 0.5
    first, second = log1p(tl.where(near, -u * u, u)), log1p(tl.where(near, 2 * u / (1 - u), -u))
    return (x + y) * 0.25 * tl.where(near, first + u * second, (1 + u) * first + product(1 - u, second))


@triton.jit
def half_log(x, y):
    """log(2 x / (x + y)) / 2, and 0 where x is 0"""
    u = apart(x, y)
    log = tl.where(u < -0.5, tl.log(x / ((x + y) * 0.5)), log1p(u))  # 1 + u would have lost digits
    return tl.where(x == 0, 0.0, 0.5 * log)


@triton.jit
def slopes(x, y):
    return half_log(x, y), half_log(y, x)


js_div, js_div_backward = pointwise_loss("js_div", value, slopes=slopes)

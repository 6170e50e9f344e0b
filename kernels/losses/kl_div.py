"""kl_div: f = y (log y - x), where 0 log 0 is 0; with log_target f = e^y (y - x)."""

import triton
import triton.language as tl

from ..engine.math import log_any
from .logistic import product, product_slope
from .pointwise_loss import pointwise_loss


@triton.jit
def log_or_0(y):
    return tl.where(y == 0, 0.0, log_any(y))


@triton.jit
def value(x, y):
    return product(y, log_or_0(y) - x)


@triton.jit
def slopes(x, y):
    return -y, product_slope(y, log_or_0(y) - x) + tl.where(y == 0, 0.0, 1.0)


@triton.jit
def of_logs(x, y):
    return product(tl.exp(y), tl.where(x == y, 0.0, y - x))


@triton.jit
def slopes_of_logs(x, y):
    e = tl.exp(y)
    return -e, product(e, tl.where(x == y, 0.0, y - x)) + e


FORMULAS = {(False,): (value, slopes), (True,): (of_logs, slopes_of_logs)}  # by log_target

kl_div, kl_div_backward = pointwise_loss("kl_div", FORMULAS)

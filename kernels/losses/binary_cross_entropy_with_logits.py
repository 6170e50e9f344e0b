"""binary_cross_entropy_with_logits: f = z y log(1 + e^-x) + (1 - y) log(1 + e^x), where z is pos_weight, or 1."""

import triton

from .logistic import at_least, linear_cost, logistic, product_slope
from .pointwise_loss import pointwise_loss


@triton.jit
def value(x, y, z):
    p, q, tail = logistic(x)
    hit, miss = y * z, 1 - y
    return linear_cost(x, hit, miss) + (hit + miss) * tail


@triton.jit
def slopes(x, y, z):
    p, q, tail = logistic(x)
    hit, miss = y * z, 1 - y
    up, down = product_slope(miss, at_least(x, 0.0)), product_slope(hit, at_least(-x, 0.0))
    return miss * p - hit * q, z * down - up + (z - 1) * tail, y * (down + tail)


@triton.jit
def plain(x, y):
    return value(x, y, 1.0)


@triton.jit
def plain_slopes(x, y):
    dx, dy, _ = slopes(x, y, 1.0)
    return dx, dy


FORMULAS = {(True,): (value, slopes), (False,): (plain, plain_slopes)}  # by whether there is a pos_weight

binary_cross_entropy_with_logits, binary_cross_entropy_with_logits_backward = pointwise_loss(
    "binary_cross_entropy_with_logits", FORMULAS, count=3, optional=True
)

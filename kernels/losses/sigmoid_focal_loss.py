"""sigmoid_focal_loss: f = a m^gamma bce, m = y q + (1 - y) p, a = alpha y + (1 - alpha) (1 - y), or 1 if alpha < 0."""

import triton
import triton.language as tl

from ..engine.math import log_unit
from .logistic import at_least, linear_cost, logistic, product_slope
from .pointwise_loss import pointwise_loss


@triton.jit
def balance(y, alpha):
    """(a, its derivative)"""
    none = alpha < 0
    hit, miss = tl.where(none, 1.0, alpha), tl.where(none, 1.0, 1 - alpha)
    return hit * y + miss * (1 - y), hit - miss


@triton.jit
def power(m, gamma, bce):
    """m^gamma, and its derivative times bce, which is 0 where it has no value. bce / m fits where m is subnormal."""
    some = m > 0
    base = tl.where(some, m, m * 0 + 1)
    to = tl.where(gamma == 2, m * m, tl.where(some, tl.exp(gamma * log_unit(base)), tl.where(gamma == 0, 1.0, m)))
    turn = tl.where(gamma == 2, 2 * m * bce, tl.where(some & (gamma != 0), gamma * to * (bce / base), 0.0))
    return tl.where(m == m, to, m), turn


@triton.jit
def value(x, y, alpha, gamma):
    p, q, tail = logistic(x)
    a, _ = balance(y, alpha)
    bce = linear_cost(x, y, 1 - y) + tail
    to, _ = power(y * q + (1 - y) * p, gamma, bce)
    return a * to * bce


value.max_registers = (112, 112)  # of 80 it would spill; arithmetic, not memory, is what it waits for


@triton.jit
def slopes(x, y, alpha, gamma):
    p, q, tail = logistic(x)
    a, moved = balance(y, alpha)
    bce = linear_cost(x, y, 1 - y) + tail
    to, turn = power(y * q + (1 - y) * p, gamma, bce)
    down, up = product_slope(y, at_least(-x, 0.0)), product_slope(1 - y, at_least(x, 0.0))
    dx = to * ((1 - y) * p - y * q) + tl.where(p * q == 0, 0.0, turn * ((1 - y) - y) * (p * q))
    return a * dx, moved * to * bce + a * (turn * (q - p) + to * (down - up))


sigmoid_focal_loss, sigmoid_focal_loss_backward = pointwise_loss("sigmoid_focal_loss", value, slopes=slopes)

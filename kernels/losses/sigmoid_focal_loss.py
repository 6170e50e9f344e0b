"""sigmoid_focal_loss: f = a m^gamma bce with p = 1 / (1 + e^-x), q = 1 - p, m = y q + (1 - y) p and
a = hit y + miss (1 - y), where hit is alpha and miss 1 - alpha, or both are 1 if alpha < 0.

m and bce are equal for (x, y) and (-x, 1 - y). They are computed from |x|: `wrong` is y for x < 0, else 1 - y. gamma =
2 has its own kernels: a square takes half the instructions of a power."""

import triton
import triton.language as tl

from ..engine.math import log1p_unit, log_unit, rough_exp, rough_quotient
from .logistic import linear_cost, product_slope
from .pointwise_loss import pointwise_loss


@triton.jit
def square(m, gamma, bce):
    """Returns (m^2, its derivative times bce)."""
    return m * m, 2 * m * bce


@triton.jit
def power(m, gamma, bce):
    """Returns (m^gamma, its derivative times bce, which is 0 for m <= 0). bce / m is in range where m is subnormal."""
    positive = m > 0
    base = tl.where(positive, m, m * 0 + 1)
    to = tl.where(positive, tl.exp(gamma * log_unit(base)), tl.where(gamma == 0, 1.0, m))
    turn = tl.where(positive & (gamma != 0), gamma * to * (bce / base), 0.0)
    return tl.where(m == m, to, m), turn


@triton.jit
def parts(x, y, POWER: tl.constexpr):
    """Returns (wrong, 1 - wrong, e = e^-|x|, bce); m = (wrong + (1 - wrong) e) / (1 + e)."""
    e = rough_exp(-tl.abs(x)) if POWER is square else tl.exp(-tl.abs(x))  # rough_exp loses an e with square 0
    wrong = tl.where(x < 0, y, 1 - y)
    return wrong, 1 - wrong, e, linear_cost(x, y, 1 - y) + log1p_unit(e)


@triton.jit
def value_of(x, y, hit, miss, gamma, POWER: tl.constexpr):
    wrong, right, e, bce = parts(x, y, POWER)
    a = hit * y + miss * (1 - y)
    to, _ = POWER(rough_quotient(wrong + right * e, 1 + e), gamma, bce)
    return a * to * bce


@triton.jit
def slopes_of(x, y, hit, miss, gamma, POWER: tl.constexpr):
    wrong, right, e, bce = parts(x, y, POWER)
    a = hit * y + miss * (1 - y)
    near = rough_quotient(1.0, 1 + e)
    to, turn = POWER(near * (wrong + right * e), gamma, bce)
    pq = e * near * near
    dx = to * (near * (wrong - right * e)) + tl.where(pq == 0, 0.0, turn * (wrong - right) * pq)
    dy = turn * (near * (1 - e)) + to * product_slope(wrong, tl.abs(x))
    side = tl.where(x < 0, -a, a)
    return side * dx, (hit - miss) * to * bce - side * dy


@triton.jit
def value_of_square(x, y, hit, miss, gamma):
    return value_of(x, y, hit, miss, gamma, square)


@triton.jit
def slopes_of_square(x, y, hit, miss, gamma):
    return slopes_of(x, y, hit, miss, gamma, square)


@triton.jit
def value_of_power(x, y, hit, miss, gamma):
    return value_of(x, y, hit, miss, gamma, power)


value_of_power.max_registers = (80, 112)  # 80 would spill; it waits for arithmetic, not for memory


@triton.jit
def slopes_of_power(x, y, hit, miss, gamma):
    return slopes_of(x, y, hit, miss, gamma, power)


# The slopes are small unless a logit is huge, and these kernels wait for arithmetic, not for memory.
slopes_of_square.small = slopes_of_power.small = True

FORMULAS = {(True,): (value_of_square, slopes_of_square), (False,): (value_of_power, slopes_of_power)}  # by gamma == 2

sigmoid_focal_loss, sigmoid_focal_loss_backward = pointwise_loss(
    "sigmoid_focal_loss",
    FORMULAS,
    flags_of=lambda alpha, gamma: (gamma == 2,),
    parameters_of=lambda alpha, gamma: (1.0, 1.0, gamma) if alpha < 0 else (alpha, 1 - alpha, gamma),
)

"""js_div: s = x + y, u = |x - y| / s, f = s/4 ((1 + u) log(1 + u) + (1 - u) log(1 - u)).

For u < 1/2 the two terms cancel. Their sum is then u^2 times a polynomial in u^2 (fp32), or (fp64) log(1 - u^2) + u
log(1 + 2 u / (1 - u)), whose terms hardly cancel. For larger u, the first term is a polynomial in 1 - u (fp32)."""

import triton
import triton.language as tl

from ..engine.math import log1p, log_any, polynomial, rough_log, rough_quotient
from .logistic import product
from .pointwise_loss import pointwise_loss

# NEAR: sum over k >= 1 of u^2k / (k (2k - 1)), over u^2, in powers of u^2 <= 1/4. FAR: (2 - v) log(2 - v) in powers of
# v = 1 - u <= 1/2. Both are fitted for the least relative error, 5e-8 and 2e-8.
NEAR = tl.constexpr((1.00000005, 0.16665668, 0.06697402, 0.03246433, 0.03555328))
FAR = tl.constexpr((1.38629434, -1.69314423, 0.24993885, 0.04213511, 0.00880909, 0.00554437))


@triton.jit
def apart(x, y):
    s = x + y
    return (x - y) / tl.where(s == 0, s + 1, s)


@triton.jit
def spread(u):
    """(1 + u) log(1 + u) + (1 - u) log(1 - u)"""
    near, v = u < 0.5, 1 - u
    if u.dtype == tl.float64:
        first, second = log1p(tl.where(near, -u * u, u)), log1p(tl.where(near, 2 * u / (1 - u), -u))
        return tl.where(near, first + u * second, (1 + u) * first + product(v, second))
    else:
        z = u * u
        far = polynomial(v, FAR, 5) + v * rough_log(tl.maximum(v, 1e-30))
        far = tl.where(v < -1e-6, float("nan"), far)  # rounding may make u slightly more than 1: v >= -1e-6 is valid
        return tl.where(near, z * polynomial(z, NEAR, 4), far)


@triton.jit
def value(x, y):
    s, d = (x + y) * 0.25, (x - y) * 0.25  # quarters: the GPU's quotient is 0 for a divisor beyond 2^126
    least = 2.0**-1022 if x.dtype == tl.float64 else 2.0**-126
    return s * spread(tl.abs(rough_quotient(d, tl.where(tl.abs(s) < least, 1.0, s))))


@triton.jit
def half_log(x, y):
    """log(2 x / (x + y)) / 2, and 0 where x is 0"""
    u = apart(x, y)
    w = tl.where(u < -0.5, x / ((x + y) * 0.5), 1 + u)  # 1 + u would have lost digits
    if u.dtype == tl.float64:
        value = tl.where(u < -0.5, tl.log(w), log1p(u))
    else:
        value = log_any(w, u)
    return tl.where(x == 0, 0.0, 0.5 * value)


@triton.jit
def slopes(x, y):
    return half_log(x, y), half_log(y, x)


slopes.small = True  # the slopes are at most 52

js_div, js_div_backward = pointwise_loss("js_div", value, slopes=slopes)

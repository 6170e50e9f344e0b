"""log_cosh_loss: with d = x - y, log(1 + 2 sinh(d / 2)^2) where |d| < log 2, else |d| - log 2 + log(1 + e^(-2 |d|)).

Both logarithms are of 1 to 5/4. They and sinh are Taylor series, their first term apart: the rest is small beside it.
"""

import triton
import triton.language as tl

from .pointwise_loss import pointwise_loss

LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sinh(x):
    """Of |x| < log 2."""
    z, p = x * x, x * 0 + 1
    for k in tl.static_range(7 if x.dtype == tl.float64 else 4, 1, -1):
        p = 1 + p * (z * (1 / (2 * k * (2 * k + 1))))
    return x + x * (z * (1 / 6) * p)


@triton.jit
def log1p(x):
    """Of 0 <= x <= 1/4, through log(1 + x) = 2 artanh(t)."""
    t = x / (2 + x)
    z, p = t * t, x * 0
    for k in tl.static_range(8 if x.dtype == tl.float64 else 3, 0, -1):
        p = 1 / (2 * k + 1) + p * z
    return 2 * t + 2 * t * z * p


@triton.jit
def value(x, y):
    a = tl.abs(x - y)
    s = sinh(a * 0.5)
    q = tl.where(a < LOG_2, 2 * s * s, tl.exp(-2 * a))  # NaN is far, and stays
    return tl.maximum(a - LOG_2, 0.0) + log1p(q)


@triton.jit
def slope(x, y):  # tanh(d)
    d = x - y
    a, s = tl.abs(d), sinh(d)
    e = tl.exp(-2 * a)
    far = (1 - e) / (1 + e)
    return tl.where(a < LOG_2, s / tl.sqrt(1 + s * s), tl.where(d < 0, -far, far))


log_cosh_loss, log_cosh_loss_backward = pointwise_loss("log_cosh_loss", value, slope)

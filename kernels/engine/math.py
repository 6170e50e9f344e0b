"""expm1 and log1p, which Triton does not have. The first term of each series is apart: the rest is small beside it."""

import triton
import triton.language as tl

LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def expm1_below(x):
    """exp(x) - 1 of x <= 0, as 2 sinh(x / 2) exp(x / 2) where exp(x) >= 1/2."""
    half = 0.5 * x
    near, e = half > -0.34657359027997264, tl.exp(half)
    h = tl.where(near, half, 0.0)  # NaN is far, and stays
    z, p = h * h, x * 0 + 1
    for k in tl.static_range(7 if x.dtype == tl.float64 else 3, 1, -1):  # the series of sinh
        p = 1 + p * (z * (1 / (2 * k * (2 * k + 1))))
    return tl.where(near, 2 * e * (h + h * (z * (1 / 6) * p)), e * e - 1)


@triton.jit
def log1p_unit(x):
    """log(1 + x) of 0 <= x <= 1, as log(1 + f) or log(2) + log(1 + f), each 2 artanh(f / (2 + f))."""
    large = x > 0.41421356237309503  # sqrt(2) - 1: from there on 1 + x = 2 (1 + (x - 1) / 2)
    f = tl.where(large, (x - 1) * 0.5, x)
    t = f / (2 + f)
    z, p = t * t, x * 0
    for k in tl.static_range(11 if x.dtype == tl.float64 else 4, 0, -1):
        p = 1 / (2 * k + 1) + p * z
    log_2 = x * 0 + LOG_2  # in the dtype of x: of two numbers tl.where makes fp32
    return tl.where(large, log_2, 0.0) + (2 * t + 2 * t * z * p)


@triton.jit
def log1p(x):
    """log(1 + x) of any x: the logarithm of u, which is 1 + x rounded, and what the rounding has cost."""
    u = 1 + x
    lost = x - (u - 1)
    return tl.log(u) + tl.where((u > 0) & (u < float("inf")), lost / u, 0.0)

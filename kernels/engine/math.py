"""Functions that Triton lacks, or has only with more instructions. (In a bf16 loss, the memory accesses of an H200 hide
about 40 instructions per element.)"""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # the interpreter has no libdevice

LOG_2 = tl.constexpr(0.6931471805599453)
SQRT_HALF = tl.constexpr(0x3F3504F3)  # the bits of sqrt(1/2) in fp32
EXPONENT, BITS_TO_LOG = tl.constexpr(-0x800000), tl.constexpr(8.262958294867817e-08)  # an exponent mask; log(2) / 2^23
# log(1 + x) / x in fp32 as polynomials in x, constant term first, fitted for the least relative error: UNIT for
# 0 <= x <= 1 (error 3e-8), NEAR for sqrt(1/2) - 1 <= x < sqrt(2) - 1 (2e-7), CLOSE for |x| < 1/4 (1e-7)
UNIT = tl.constexpr(
    (1.0, -0.49999648, 0.33321321, -0.24857157, 0.19153631, -0.13753749, 0.079203904, -0.030065399, 0.0053647249)
)
NEAR = tl.constexpr((1.0, -0.50000322, 0.33334714, -0.24971227, 0.19906884, -0.17243245, 0.16180493, -0.10082294))
CLOSE = tl.constexpr((0.99999999, -0.50000368, 0.33334038, -0.24953356, 0.19942384, -0.18127258, 0.15757424))

# (atan(x) / x - 1) / x^2 as polynomials in x^2, for |x| <= tan(pi / 8), in fp32 and fp64; as in csrc/cpu/engine/math.h
ATAN = tl.constexpr((-0.333333325, 0.199999039, -0.142820065, 0.110446752, -0.0847617421, 0.0474384482))
ATAN_64 = tl.constexpr(
    (
        -0.333333333333332,
        0.19999999999953214,
        -0.1428571428016296,
        0.11111110781963236,
        -0.09090897719429963,
        0.0769205960888318,
        -0.06663097917954133,
        0.05847849568697479,
        -0.05039145239178185,
        0.038060957190197676,
        -0.017903708669202895,
    )
)


@triton.jit
def polynomial(x, factors: tl.constexpr, DEGREE: tl.constexpr):
    p = factors[DEGREE]
    for k in tl.static_range(DEGREE - 1, -1, -1):
        p = p * x + factors[k]
    return p


@triton.jit
def rounded_product(a, b):
    """a b, rounded before anything is added to it, so that it is never fused into an addition.

    All lanes that add up a row hold its sum, and any of them may store it. If two lanes exchanged products and fused
    their own with the addition, each would round only the other's product, and their sums would differ."""
    if INTERPRETED:
        return a * b
    elif hasattr(libdevice, "mul_rn"):
        return libdevice.mul_rn(a, b)
    else:  # AMD's libdevice has no mul_rn
        return a * b


@triton.jit
def rounded_root(x):
    """sqrt(x), rounded as IEEE 754 demands: tl.sqrt of fp32 is an approximation."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def rounded_quotient(a, b):
    """a / b, rounded as IEEE 754 demands: the operator of fp32 is an approximation, and only for b up to 2^126."""
    if b.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def exponential(x):
    """exp(x) = exp2(x log2(e)). Triton's exp2 flushes subnormal results to 0; its exp takes three more instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def expm1_nonpositive(x):
    """exp(x) - 1 for x <= 0: 2 sinh(x / 2) exp(x / 2) where exp(x) > 1/2, exp(x / 2)^2 - 1 elsewhere. The first term of
    the sinh series is added last, because the other terms are small beside it."""
    half = 0.5 * x
    near, e = half > -0.34657359027997264, tl.exp(half)
    h = tl.where(near, half, 0.0)  # NaN is not near, and e * e - 1 keeps it
    z, p = h * h, x * 0 + 1
    for k in tl.static_range(7 if x.dtype == tl.float64 else 3, 1, -1):  # the series of sinh
        p = 1 + p * (z * (1 / (2 * k * (2 * k + 1))))
    return tl.where(near, 2 * e * (h + h * (z * (1 / 6) * p)), e * e - 1)


@triton.jit
def log1p_unit(x):
    """log(1 + x) for 0 <= x <= 1. In fp64, up to x = sqrt(2) - 1: 2 artanh(f / (2 + f)) with f = x. Above it: log(2) +
    2 artanh(f / (2 + f)) with f = (x - 1) / 2."""
    if x.dtype != tl.float64:
        return x * polynomial(x, UNIT, 8)
    else:
        large = x > 0.41421356237309503  # x > sqrt(2) - 1
        f = tl.where(large, (x - 1) * 0.5, x)
        t = f / (2 + f)
        z, p = t * t, x * 0
        for k in tl.static_range(11, 0, -1):
            p = 1 / (2 * k + 1) + p * z
        log_2 = x * 0 + LOG_2  # in the dtype of x: tl.where of two Python numbers gives fp32
        return tl.where(large, log_2, 0.0) + (2 * t + 2 * t * z * p)


@triton.jit
def log_unit(x):
    """log(x) for 0 <= x <= 1. It is below -104 for x = 0, and an arbitrary number for any other x."""
    if x.dtype == tl.float64:
        return tl.log(x)
    else:
        bits = (tl.abs(x) * 2.0**24).to(tl.int32, bitcast=True)  # abs: -0 becomes 0; times 2^24: no subnormal is left
        power = (bits - (SQRT_HALF + (24 << 23))) & EXPONENT
        f = (bits - power - (24 << 23)).to(tl.float32, bitcast=True) - 1
        return power.to(tl.float32) * BITS_TO_LOG + f * polynomial(f, NEAR, 7)


@triton.jit
def rough_log2(x):
    """log2(x) for a normal x or 0, by the GPU's own instruction, in place of the 25 of tl.log2. The error is 2^-22
    relative, and 2^-22 absolute from 1/2 to 2. In fp64 it is tl.log2."""
    if x.dtype == tl.float64 or INTERPRETED:
        return tl.log2(x)
    elif hasattr(libdevice, "fast_log2f"):
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def rough_log(x):
    """log(x) by rough_log2. In fp64 it is tl.log."""
    if x.dtype == tl.float64:
        return tl.log(x)
    else:
        return rough_log2(x) * LOG_2


@triton.jit
def rough_exp(x):
    """exp(x) by the GPU's own exp2, 0 where that is below the normal numbers: two instructions in place of five."""
    if x.dtype == tl.float64 or INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp2(x * (1 / LOG_2))


@triton.jit
def rough_quotient(a, b):
    """a / b for a normal b up to 2^126: two instructions in place of eight."""
    if b.dtype == tl.float64 or INTERPRETED:
        return a / b
    else:
        return libdevice.fast_dividef(a, b)


@triton.jit
def log_apart(x):
    """log(x) for an x that is not near 1, with a relative error of 8e-7."""
    if x.dtype == tl.float64:
        return tl.log(x)
    else:
        scale = tl.where(x < 2.0**-126, 2.0**24, 1.0)  # the GPU's logarithm takes a subnormal number for 0
        back = 24 * LOG_2 / (2**24 - 1)  # times 1 - scale: -24 log(2) or 0, without a second `where`
        return rough_log(x * scale) + (back - back * scale)


@triton.jit
def log_any(x, f=None):
    """log(x) with a relative error of 8e-7. Near 1 it is a polynomial in f = x - 1: pass an f with more digits."""
    if x.dtype == tl.float64:
        return tl.log(x)
    else:
        f = x - 1 if f is None else f
        return tl.where(tl.abs(f) < 0.25, f * polynomial(f, CLOSE, 6), log_apart(x))


@triton.jit
def log1p_above(x):
    """log(1 + x) for an x such that 1 + x is a normal number."""
    if x.dtype == tl.float64:
        return log1p(x)
    else:
        return tl.where(tl.abs(x) < 0.25, x * polynomial(x, CLOSE, 6), rough_log(1 + x))


@triton.jit
def log1p(x):
    """log(1 + x) for any x: log(u) + (x - (u - 1)) / u, where u is 1 + x rounded."""
    u = 1 + x
    lost = x - (u - 1)
    return tl.log(u) + tl.where((u > 0) & (u < float("inf")), lost / u, 0.0)


@triton.jit
def atan_unit(x):
    """atan(x) for 0 <= x <= 1. For x > tan(pi / 8) it is pi / 4 + atan((x - 1) / (x + 1))."""
    turned = x > 0.41421356237309503
    t = tl.where(turned, (x - 1) / (x + 1), x)  # NaN stays
    z = t * t
    if x.dtype == tl.float64:
        angle = t + t * z * polynomial(z, ATAN_64, 10)
    else:
        angle = t + t * z * polynomial(z, ATAN, 5)
    return tl.where(turned, angle + 0.7853981633974483, angle)

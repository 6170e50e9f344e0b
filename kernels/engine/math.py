"""Functions that Triton does not have, or only with more instructions: an H200 has 40 for an element of a bf16 loss."""

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # where there is no libdevice

LOG_2 = tl.constexpr(0.6931471805599453)
SQRT_HALF = tl.constexpr(0x3F3504F3)  # its bits
EXPONENT, BITS_TO_LOG = tl.constexpr(-0x800000), tl.constexpr(8.262958294867817e-08)  # the latter: log(2) / 2^23
# log(1 + x) / x in fp32, by powers of x: of 0 <= x <= 1, of sqrt(1/2) - 1 <= x < sqrt(2) - 1, and of |x| < 1/4. Fitted
# for the least relative error, 3e-8, 2e-7 and 1e-7.
UNIT = tl.constexpr(
    (1.0, -0.49999648, 0.33321321, -0.24857157, 0.19153631, -0.13753749, 0.079203904, -0.030065399, 0.0053647249)
)
NEAR = tl.constexpr((1.0, -0.50000322, 0.33334714, -0.24971227, 0.19906884, -0.17243245, 0.16180493, -0.10082294))
CLOSE = tl.constexpr((0.99999999, -0.50000368, 0.33334038, -0.24953356, 0.19942384, -0.18127258, 0.15757424))

# (atan(x) / x - 1) / x^2 by powers of x^2, of |x| <= tan(pi / 8): in fp32 and in fp64, those of csrc/cpu/engine/math.h
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
    """a b, for sums over lanes: rounded before anything is added to it, in every lane alike.

    Lanes that add up a row hold the same sums, and any of them may store them. Two that exchange products, and fuse
    their own with the addition, would each round the other's alone."""
    if INTERPRETED:
        return a * b
    elif hasattr(libdevice, "mul_rn"):
        return libdevice.mul_rn(a, b)
    else:  # AMD has none
        return a * b


@triton.jit
def rounded_root(x):
    """sqrt(x), rounded as IEEE 754 says: of fp32 tl.sqrt is an approximation."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def rounded_quotient(a, b):
    """a / b, rounded as IEEE 754 says: of fp32 the operator is an approximation, of a b up to 2^126."""
    if b.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def exponential(x):
    """exp(x) by way of exp2, of which Triton's, unlike its exp, flushes to 0 what is below the normal numbers: three
    instructions less."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def expm1_below(x):
    """exp(x) - 1 of x <= 0, as 2 sinh(x / 2) exp(x / 2) where exp(x) >= 1/2. The series' first term is apart: the rest
    is small beside it."""
    half = 0.5 * x
    near, e = half > -0.34657359027997264, tl.exp(half)
    h = tl.where(near, half, 0.0)  # NaN is far, and stays
    z, p = h * h, x * 0 + 1
    for k in tl.static_range(7 if x.dtype == tl.float64 else 3, 1, -1):  # the series of sinh
        p = 1 + p * (z * (1 / (2 * k * (2 * k + 1))))
    return tl.where(near, 2 * e * (h + h * (z * (1 / 6) * p)), e * e - 1)


@triton.jit
def log1p_unit(x):
    """log(1 + x) of 0 <= x <= 1; in fp64 as log(1 + f) or log(2) + log(1 + f), each 2 artanh(f / (2 + f))."""
    if x.dtype != tl.float64:
        return x * polynomial(x, UNIT, 8)
    else:
        large = x > 0.41421356237309503  # sqrt(2) - 1: from there on 1 + x = 2 (1 + (x - 1) / 2)
        f = tl.where(large, (x - 1) * 0.5, x)
        t = f / (2 + f)
        z, p = t * t, x * 0
        for k in tl.static_range(11, 0, -1):
            p = 1 / (2 * k + 1) + p * z
        log_2 = x * 0 + LOG_2  # in the dtype of x: of two numbers tl.where makes fp32
        return tl.where(large, log_2, 0.0) + (2 * t + 2 * t * z * p)


@triton.jit
def log_unit(x):
    """log(x) of 0 <= x <= 1; below -104 of 0, any number of others."""
    if x.dtype == tl.float64:
        return tl.log(x)
    else:
        bits = (tl.abs(x) * 2.0**24).to(tl.int32, bitcast=True)  # of -0 too; and no subnormal number is left one
        power = (bits - (SQRT_HALF + (24 << 23))) & EXPONENT
        f = (bits - power - (24 << 23)).to(tl.float32, bitcast=True) - 1
        return power.to(tl.float32) * BITS_TO_LOG + f * polynomial(f, NEAR, 7)


@triton.jit
def rough_log2(x):
    """The base 2 logarithm of a normal x, or of 0, by the GPU's own: right to 2^-22 of itself, and from 1/2 to 2 to
    2^-22; one instruction for the 25 of tl.log2. In fp64 it is tl.log2."""
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
    """exp(x) by the GPU's own base 2 power, and 0 where that is no normal number: two instructions for five."""
    if x.dtype == tl.float64 or INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp2(x * (1 / LOG_2))


@triton.jit
def rough_quotient(a, b):
    """a / b of a normal b up to 2^126: two instructions for eight."""
    if b.dtype == tl.float64 or INTERPRETED:
        return a / b
    else:
        return libdevice.fast_dividef(a, b)


@triton.jit
def log_apart(x):
    """log(x), to 8e-7 of itself where it is not near 1."""
    if x.dtype == tl.float64:
        return tl.log(x)
    else:
        scale = tl.where(x < 2.0**-126, 2.0**24, 1.0)  # a subnormal number is 0 to the GPU's logarithm
        back = 24 * LOG_2 / (2**24 - 1)  # times 1 - scale: two uses of a condition cost far more
        return rough_log(x * scale) + (back - back * scale)


@triton.jit
def log_any(x, f=None):
    """log(x), to 8e-7 of itself; near 1 a polynomial of f = x - 1, which is better known than x if it is given."""
    if x.dtype == tl.float64:
        return tl.log(x)
    else:
        f = x - 1 if f is None else f
        return tl.where(tl.abs(f) < 0.25, f * polynomial(f, CLOSE, 6), log_apart(x))


@triton.jit
def log1p_above(x):
    """log(1 + x) of an x that leaves 1 + x a normal number."""
    if x.dtype == tl.float64:
        return log1p(x)
    else:
        return tl.where(tl.abs(x) < 0.25, x * polynomial(x, CLOSE, 6), rough_log(1 + x))


@triton.jit
def log1p(x):
    """log(1 + x) of any x: the logarithm of u, which is 1 + x rounded, and what the rounding has cost."""
    u = 1 + x
    lost = x - (u - 1)
    return tl.log(u) + tl.where((u > 0) & (u < float("inf")), lost / u, 0.0)


@triton.jit
def atan_unit(x):
    """atan(x) of 0 <= x <= 1: from tan(pi / 8) on pi / 4 + atan((x - 1) / (x + 1))."""
    turned = x > 0.41421356237309503
    t = tl.where(turned, (x - 1) / (x + 1), x)  # NaN stays
    z = t * t
    if x.dtype == tl.float64:
        angle = t + t * z * polynomial(z, ATAN_64, 10)
    else:
        angle = t + t * z * polynomial(z, ATAN, 5)
    return tl.where(turned, angle + 0.7853981633974483, angle)

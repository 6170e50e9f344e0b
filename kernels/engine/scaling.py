"""Powers of two that keep squares and products in range: to multiply by a power of two is exact.

Powers are read from the exponent bits and written to them, because exp2 is an approximation on a GPU.
"""

import triton
import triton.language as tl

# A positive number v that is too large for fp64 is stored as -v / BEYOND. Numbers that can be negative themselves are
# never that large.
BEYOND = tl.constexpr(2.0**64)
MARKED = tl.constexpr(-(2.0**959))  # -v / BEYOND is at most this
HALF_RANGE = tl.constexpr(252)  # two fp32 powers of two reach 2^-252 to 2^252 together


@triton.jit
def power_below(x):
    """The largest power of two that is at most x, for x >= 0, clamped so that its reciprocal is a normal number, too.

    For 0 it is the smallest such power, for inf and NaN the largest."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FF0000000000000
        bits = tl.minimum(tl.maximum(bits, 0x0010000000000000), 0x7FD0000000000000)
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
    return bits.to(x.dtype, bitcast=True)


@triton.jit
def reciprocal(power):
    """1 / power, exactly, for a result of power_below."""
    if power.dtype == tl.float64:
        bits = 0x7FE0000000000000 - power.to(tl.int64, bitcast=True)
    else:
        bits = 0x7F000000 - power.to(tl.int32, bitcast=True)
    return bits.to(power.dtype, bitcast=True)


@triton.jit
def product_beyond(root, unit):
    """root * unit for a power of two `unit`; -root * unit / BEYOND where the product is too large."""
    product = root * unit
    return tl.where((product == float("inf")) & (root < float("inf")), -(root * (unit / BEYOND)), product)


@triton.jit
def inverse_beyond(root, unit):
    """1 / (root * unit), 0 if root is 0; -1 / (root * unit * BEYOND) where it is too large. unit: from power_below."""
    root = tl.where(root == 0, float("inf"), root)
    inverse = reciprocal(unit) / root
    return tl.where(inverse == float("inf"), -(reciprocal(unit) / BEYOND / root), inverse)


@triton.jit
def single_power(exponent):
    """2 ** exponent in fp32, for -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def apart(c):
    """An fp64 c as two fp32 factors (first, power): c = first * power, power a power of two of about half c's exponent.

    c may be out of the range of fp32, if the x that it multiplies is at the other end of the range: x * first * power
    then neither overflows on the way nor loses bits that the result has."""
    bits = c.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF).to(tl.int32) - 1023
    exponent = tl.minimum(tl.maximum(exponent, -HALF_RANGE), HALF_RANGE)
    half = exponent >> 1
    inverse = ((1023 - half).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return (c * inverse).to(tl.float32), single_power(half)


@triton.jit
def quotient_apart(a, b):
    """a / b for fp32 a and fp64 b, to fp32 accuracy, as two factors (`apart`). It needs no slow division in fp64."""
    up, down = power_below(a), reciprocal(power_below(b))
    q = a * reciprocal(up) / (b * down).to(tl.float32)
    return apart(q.to(tl.float64) * (up.to(tl.float64) * down))

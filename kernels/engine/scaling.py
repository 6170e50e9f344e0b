"""Powers of two that keep squares and products within range: multiplying by one is exact.

A power is read from, and written to, the exponent bits: exp2 is an approximation on a GPU.
"""

import triton
import triton.language as tl

# A positive number that is too large for fp64 is kept divided by BEYOND, with a minus. What is negative itself is never
# that large.
BEYOND = tl.constexpr(2.0**64)
MARKED = tl.constexpr(-(2.0**959))  # from here down
HALF_RANGE = tl.constexpr(252)  # exponents that two fp32 powers of two reach together


@triton.jit
def power_below(x):
    """The largest power of two at most x >= 0, within the range whose reciprocals are normal numbers as well.

    0 gives the smallest, inf and NaN the largest."""
    if x.dtype == tl.float64:
        bits = x.to(tl.int64, bitcast=True) & 0x7FF0000000000000
        bits = tl.minimum(tl.maximum(bits, 0x0010000000000000), 0x7FD0000000000000)
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
    return bits.to(x.dtype, bitcast=True)


@triton.jit
def reciprocal(power):
    """1 / power, of a result of power_below."""
    if power.dtype == tl.float64:
        bits = 0x7FE0000000000000 - power.to(tl.int64, bitcast=True)
    else:
        bits = 0x7F000000 - power.to(tl.int32, bitcast=True)
    return bits.to(power.dtype, bitcast=True)


@triton.jit
def product_beyond(root, unit):
    """root * unit, for a power of two, in units of BEYOND where it is too large."""
    product = root * unit
    return tl.where((product == float("inf")) & (root < float("inf")), -(root * (unit / BEYOND)), product)


@triton.jit
def inverse_beyond(root, unit):
    """1 / (root * unit) for a result of power_below, in units of BEYOND where it is too large; 0 where root is 0."""
    root = tl.where(root == 0, float("inf"), root)
    inverse = reciprocal(unit) / root
    return tl.where(inverse == float("inf"), -(reciprocal(unit) / BEYOND / root), inverse)


@triton.jit
def single_power(exponent):
    """2 ** exponent in fp32, for -126 <= exponent <= 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def apart(c):
    """fp64 c as two fp32 factors, the second a power of two of about half the exponent.

    c may lie outside the range of fp32; what it multiplies then lies outside at the other end. Multiplied by the first
    and then by the second, no product overflows or loses bits that the result has."""
    bits = c.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF).to(tl.int32) - 1023
    exponent = tl.minimum(tl.maximum(exponent, -HALF_RANGE), HALF_RANGE)
    half = exponent >> 1
    inverse = ((1023 - half).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return (c * inverse).to(tl.float32), single_power(half)


@triton.jit
def quotient_apart(a, b):
    """a / b of fp32 a and fp64 b, to the digits of fp32, `apart`: without a division in fp64, which is slow."""
    up, down = power_below(a), reciprocal(power_below(b))
    q = a * reciprocal(up) / (b * down).to(tl.float32)
    return apart(q.to(tl.float64) * (up.to(tl.float64) * down))

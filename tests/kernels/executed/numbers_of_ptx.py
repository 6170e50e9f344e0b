"""The number types of the PTX ISA in Python: decoding, rounding and edge values."""

import math
from fractions import Fraction
from typing import NamedTuple


class Float(NamedTuple):
    bits: int
    precision: int  # bits of the significand, with the implicit bit
    least: int  # exponent of the smallest normal number

    @property
    def infinity(self):
        return (1 << self.bits - 1) - (1 << self.precision - 1)

    def value(self, bits):
        """Returns the value of the bits as a Python float, which holds each of these types exactly."""
        sign, magnitude = bits >> self.bits - 1, bits & (1 << self.bits - 1) - 1
        if magnitude >= self.infinity:
            return math.copysign(math.nan if magnitude > self.infinity else math.inf, -1 if sign else 1)
        exponent, fraction = magnitude >> self.precision - 1, magnitude & (1 << self.precision - 1) - 1
        if exponent:
            fraction, exponent = fraction | 1 << self.precision - 1, exponent - 1
        return (-1.0 if sign else 1.0) * math.ldexp(fraction, exponent + self.least - self.precision + 1)

    def encoded(self, x, mode="nearest"):
        """Returns the bits of x: a Fraction, which is rounded once, or a float that is 0, infinite or NaN."""
        top = 1 << self.bits - 1
        if isinstance(x, float) and (x == 0 or not math.isfinite(x)):
            sign = top if math.copysign(1, x) < 0 else 0
            return top - 1 if x != x else sign | (self.infinity if x else 0)
        x = Fraction(x)
        size = abs(x)
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        exponent = max(exponent - (size < Fraction(2) ** exponent), self.least)
        scaled = size / Fraction(2) ** (exponent - self.precision + 1)
        whole = math.floor(scaled)
        rest = scaled - whole
        upward = {
            "nearest": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1),
            "zero": False,
            "down": x < 0 and rest > 0,
            "up": x > 0 and rest > 0,
        }
        bits = (exponent - self.least << self.precision - 1) + whole + bool(upward[mode])
        if bits >= self.infinity:
            keeps = mode == "zero" or mode == ("down" if x > 0 else "up")
            bits = self.infinity - keeps
        return bits | (top if x < 0 else 0)


FLOATS = {
    "f16": Float(16, 11, -14),
    "bf16": Float(16, 8, -126),
    "f32": Float(32, 24, -126),
    "f64": Float(64, 53, -1022),
}


def width(kind):
    return {"pred": 1, "amount": 32}.get(kind) or int(kind.lstrip("usbf"))


def decoded(kind, bits):
    """Returns the number that these bits encode. Bits above the type's width are ignored."""
    if kind in FLOATS:
        return FLOATS[kind].value(bits)
    bits &= (1 << width(kind)) - 1
    return bits - (bits >> width(kind) - 1 << width(kind)) if kind[0] == "s" else bits


def edges(kind):
    """Returns registers' bits that encode the limits of the type, and values between them."""
    n = width(kind)
    if kind == "pred":
        return [0, 1]
    if kind == "amount":
        return [0, 1, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 255, 256, 257, (1 << 32) - 1]
    if kind in FLOATS:
        _, precision, least = FLOATS[kind]
        fraction, infinity, one = 1 << precision - 1, FLOATS[kind].infinity, -least << precision - 1
        positive = [0, 1, fraction - 1, fraction, fraction + 1, one - 1, one, one + 1, one + fraction // 2]
        positive += [infinity - 1, infinity, infinity + 1, infinity + fraction // 2, one + 3 * fraction + fraction // 4]
        positive += [one + (precision - 1) * fraction + 1, one // 2 + 3, one - fraction // 3]
        return [bits | sign << n - 1 for bits in positive for sign in (0, 1)]
    top = 1 << n - 1
    some = [0, 1, 2, 3, 7, 10, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 2 * top - 7, 0x5A3C96A5C396F00F % top]
    # An 8-bit type has a 16-bit register; its upper 8 bits get an arbitrary pattern.
    return [x | (0xA5 - x & 0xFF) << 8 for x in some] if n == 8 else some


def exact(f, *values):
    """Returns f(*values), computed exactly: a Fraction if the result is finite and not zero, else a float (signed zero,
    infinity or NaN)."""
    if all(map(math.isfinite, values)):
        result = f(*map(Fraction, values))
        if result:
            return result
    try:
        return f(*values)
    except OverflowError:
        return math.inf


def single(x):
    """Returns the nearest fp32 number as a float."""
    return FLOATS["f32"].value(FLOATS["f32"].encoded(x))


def packed(low, high, bits=16):
    return low | high << bits

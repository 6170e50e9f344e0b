"""The executor's instructions compute what the PTX ISA defines, on values at the edges of their types."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.kernels.executed import machine
from tests.kernels.executed.handwritten import execute, lanes, needs_compiler, program
from tests.kernels.executed.numbers_of_ptx import FLOATS, decoded, edges, exact, packed, single, width

# xdist_group: one worker compiles the executor
pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.xdist_group("machine")]
MOST_CASES = 400
UNSPECIFIED = object()
INTEGERS = "s16 u16 s32 u32 s64 u64".split()


class Bits(int):
    """A result whose bits must agree, even if it is a NaN."""


def quotient(a, b):
    """Returns a / b rounded toward zero. The ISA leaves a quotient by 0 open."""
    return UNSPECIFIED if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a, b):
    return UNSPECIFIED if b == 0 else a - b * quotient(a, b)


def bit_field(bits, signed):
    """Returns a function that computes bfe (extract a bit field) as the ISA defines it, bit by bit."""

    def extract(a, b, c):
        position, length = b & 255, c & 255
        sign = a >> min(position + length - 1, bits - 1) & 1 if signed and length else 0
        field = [a >> position + k & 1 if k < length and position + k < bits else sign for k in range(bits)]
        return sum(bit << k for k, bit in enumerate(field))

    return extract


def inserted(bits):
    def insert(a, b, c, d):
        position, length = c & 255, d & 255
        for k in range(length):
            if position + k < bits:
                b = b & ~(1 << position + k) | (a >> k & 1) << position + k
        return b

    return insert


def permuted(a, b, c):
    """prmt: each of c's four hex digits chooses a byte of a and b; a digit's highest bit replicates its byte's sign
    bit."""
    source, result = (a | b << 32).to_bytes(8, "little"), 0
    for k in range(4):
        digit = c >> 4 * k & 15
        byte = source[digit & 7]
        result |= (byte if digit < 8 else 255 * (byte >> 7)) << 8 * k
    return result


def extreme(kind, pick, nan_wins=False):
    def result(a, b):
        if a != a or b != b:
            is_nan = nan_wins or (a != a and b != b)
            return Bits((1 << width(kind) - 1) - 1) if is_nan and kind != "f64" else math.nan if is_nan else min(
                (x for x in (a, b) if x == x), default=math.nan
            )  # fmt: skip
        return pick(a, b, key=lambda x: (x, math.copysign(1, x)))

    return result


def fused(a, b, c):
    if all(map(math.isfinite, (a, b))) and not math.isfinite(c):
        return c
    return exact(lambda a, b, c: a * b + c, a, b, c)


def fused_down(a, b, c):
    """fma rounded down: an exact zero sum is -0, unless both terms are +0."""
    result = fused(a, b, c)
    positive = math.copysign(1, a) * math.copysign(1, b) > 0 and math.copysign(1, c) > 0
    return result if result else 0.0 if positive else -0.0


def ratio(a, b):
    if b == 0 or not math.isfinite(a) or not math.isfinite(b):
        with np.errstate(all="ignore"):
            return float(np.float64(a) / np.float64(b))
    return exact(lambda a, b: a / b, a, b)


def root(precision):
    """Returns a function that computes a square root with so many bits that one more rounding is right. An odd last bit
    marks an inexact root."""

    def result(a):
        if a < 0 or a != a or a in (0, math.inf):
            return math.nan if a < 0 or a != a else a
        x = Fraction(a)
        shift = 2 * (precision + 4) + 2 * max(0, x.denominator.bit_length() - x.numerator.bit_length())
        scaled = (x.numerator << 2 * shift) // x.denominator
        whole = math.isqrt(scaled)
        return Fraction(
            2 * whole + (whole * whole != scaled or (x.numerator << 2 * shift) % x.denominator != 0), 2 << shift
        )

    return result


def flushed(f):
    def flush(x):
        return math.copysign(0.0, x) if abs(x) < 2**-126 else x

    def result(*values):
        r = f(*map(flush, values))
        r = FLOATS["f32"].value(FLOATS["f32"].encoded(r))
        return flush(r)

    return result


def to_integer(kind, rounding):
    low, high = (-1 << width(kind) - 1, (1 << width(kind) - 1) - 1) if kind[0] == "s" else (0, (1 << width(kind)) - 1)

    def result(a, is_double=False):
        if a != a:
            return 1 << width(kind) - 1 if is_double or width(kind) == 64 else 0
        return min(max(rounding(a), low), high) if math.isfinite(a) else low if a < 0 else high

    return result


def whole(rounding):
    """Returns a function that rounds a float to a whole number; a zero keeps its sign."""
    return lambda a: a if not math.isfinite(a) else float(rounding(a)) if rounding(a) else math.copysign(0.0, a)


def each_half(kind, f):
    """Returns a function that applies f to the low and to the high half of packed operands."""
    n, half = width(kind), kind

    def result(*values):
        parts = [[decoded(half, x >> shift & (1 << n) - 1) for x in values] for shift in (0, n)]
        return [f(*part) for part in parts]

    return result


def encoded(kind, value, mode="nearest"):
    if isinstance(value, Bits) or kind not in FLOATS:
        return int(value) & (1 << width(kind)) - 1
    return FLOATS[kind].encoded(value, mode)


PRODUCTS = {"16": "32", "32": "64"}
COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a < b or a > b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
COMBINED = {"and": lambda p, c: p & c, "or": lambda p, c: p | c, "xor": lambda p, c: p ^ c}


def integer_rows():
    for t in INTEGERS:
        n, sign = t[1:], t[0]
        yield f"add.{t}", f"{t}: {t} {t}", lambda a, b: a + b
        yield f"sub.{t}", f"{t}: {t} {t}", lambda a, b: a - b
        yield f"mul.lo.{t}", f"{t}: {t} {t}", lambda a, b: a * b
        yield f"mul.hi.{t}", f"{t}: {t} {t}", lambda a, b, n=int(n): a * b >> n
        yield f"mad.lo.{t}", f"{t}: {t} {t} {t}", lambda a, b, c: a * b + c
        yield f"min.{t}", f"{t}: {t} {t}", min
        yield f"max.{t}", f"{t}: {t} {t}", max
        yield f"div.{t}", f"{t}: {t} {t}", quotient
        yield f"rem.{t}", f"{t}: {t} {t}", remainder
        yield f"shr.{t}", f"{t}: {t} amount", lambda a, b, n=int(n): a >> min(b, n)
        if sign == "s":
            yield f"neg.{t}", f"{t}: {t}", lambda a: -a
            yield f"abs.{t}", f"{t}: {t}", abs
        if n in PRODUCTS:
            w = sign + PRODUCTS[n]
            yield f"mul.wide.{t}", f"{w}: {t} {t}", lambda a, b: a * b
            yield f"mad.wide.{t}", f"{w}: {t} {t} {w}", lambda a, b, c: a * b + c
            yield f"mad.hi.{t}", f"{t}: {t} {t} {t}", lambda a, b, c, n=int(n): (a * b >> n) + c
        if n != "16":
            yield f"bfe.{t}", f"{t}: {t} amount amount", bit_field(int(n), sign == "s")
    for t in ("b16", "b32", "b64"):
        n = width(t)
        yield f"and.{t}", f"{t}: {t} {t}", lambda a, b: a & b
        yield f"or.{t}", f"{t}: {t} {t}", lambda a, b: a | b
        yield f"xor.{t}", f"{t}: {t} {t}", lambda a, b: a ^ b
        yield f"not.{t}", f"{t}: {t}", lambda a: ~a
        yield f"shl.{t}", f"{t}: {t} amount", lambda a, b: a << min(b, 64)
        yield f"shr.{t}", f"{t}: {t} amount", lambda a, b: a >> b
        for kind in "busf"[: 4 if n > 16 else 3]:
            k = f"{kind}{n}"
            yield f"mov.{k}", f"{t}: {t}", lambda a: a
            yield f"selp.{k}", f"{t}: {t} {t} pred", lambda a, b, p: a if p else b
        if n > 16:
            yield f"popc.{t}", f"u32: {t}", lambda a: bin(a).count("1")
            yield f"clz.{t}", f"u32: {t}", lambda a, n=n: n - a.bit_length()
            yield f"brev.{t}", f"{t}: {t}", lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2)
            yield f"bfi.{t}", f"{t}: {t} {t} amount amount", inserted(n)
    yield "prmt.b32", "b32: b32 b32 b32", permuted
    yield "shf.l.wrap.b32", "b32: b32 b32 amount", lambda a, b, c: (a | b << 32) << (c & 31) >> 32
    yield "shf.r.wrap.b32", "b32: b32 b32 amount", lambda a, b, c: (a | b << 32) >> (c & 31)
    yield "shf.l.clamp.b32", "b32: b32 b32 amount", lambda a, b, c: (a | b << 32) << min(c, 32) >> 32
    yield "shf.r.clamp.b32", "b32: b32 b32 amount", lambda a, b, c: (a | b << 32) >> min(c, 32)
    yield "dp4a.u32.u32", "b32: b32 b32 b32", lambda a, b, c: c + sum(
        x * y for x, y in zip(a.to_bytes(4, "little"), b.to_bytes(4, "little"))
    )  # fmt: skip
    for t in ("s16", "u16"):
        for name, f in (("add", lambda a, b: a + b), ("min", min), ("max", max)):
            yield f"{name}.{t}x2", f"{t}x2: {t}x2 {t}x2", each_half(t, f)


def predicate_rows():
    for name, f in COMBINED.items():
        yield f"{name}.pred", "pred: pred pred", f
    yield "not.pred", "pred: pred", lambda p: not p
    yield "mov.pred", "pred: pred", lambda p: p
    for t in (*INTEGERS, "b16", "b32", "b64"):
        for name, f in COMPARISONS.items():
            yield f"setp.{name}.{t}", f"pred: {t} {t}", f
    for t in FLOATS:
        for name, f in COMPARISONS.items():
            yield f"setp.{name}.{t}", f"pred: {t} {t}", f
            yield f"setp.{name}u.{t}", f"pred: {t} {t}", lambda a, b, f=f: a != a or b != b or f(a, b)
        yield f"setp.num.{t}", f"pred: {t} {t}", lambda a, b: a == a and b == b
        yield f"setp.nan.{t}", f"pred: {t} {t}", lambda a, b: a != a or b != b
    # setp writes p = (a < b) and q = (a >= b), each combined with the predicate c.
    for name, f in COMBINED.items():
        yield f"setp.lt.{name}.s32", "pred pred: s32 s32 pred", lambda a, b, c, f=f: (f(a < b, c), f(a >= b, c))
        yield f"setp.gtu.{name}.f32", "pred pred: f32 f32 pred", lambda a, b, c, f=f: (f(not a <= b, c), f(a <= b, c))
    yield "setp.eq.s64", "pred pred: s64 s64", lambda a, b: (a == b, a != b)
    for t in ("f16", "bf16"):  # packed: p compares the low halves and q the high halves

        def unequal(a, b, t=t):
            return tuple(not decoded(t, a >> k & 0xFFFF) == decoded(t, b >> k & 0xFFFF) for k in (0, 16))

        yield f"setp.neu.{t}x2", f"pred pred: {t}x2 {t}x2", unequal
        yield f"setp.neu.and.{t}x2", f"pred pred: {t}x2 {t}x2 pred", lambda a, b, c, f=unequal: tuple(
            p and c for p in f(a, b)
        )  # fmt: skip


def float_rows():
    for t in ("f32", "f64", "f16", "bf16"):
        for rn in ("", ".rn"):
            yield f"add{rn}.{t}", f"{t}: {t} {t}", lambda a, b: exact(lambda a, b: a + b, a, b)
            yield f"sub{rn}.{t}", f"{t}: {t} {t}", lambda a, b: exact(lambda a, b: a - b, a, b)
            yield f"mul{rn}.{t}", f"{t}: {t} {t}", lambda a, b: exact(lambda a, b: a * b, a, b)
        yield f"fma.rn.{t}", f"{t}: {t} {t} {t}", fused
        yield f"neg.{t}", f"{t}: {t}", lambda a: -a
        yield f"abs.{t}", f"{t}: {t}", abs
        for name, pick in (("min", min), ("max", max)):
            yield f"{name}.{t}", f"{t}: {t} {t}", extreme(t, pick)
            if t != "f64":
                yield f"{name}.NaN.{t}", f"{t}: {t} {t}", extreme(t, pick, True)
    for t in ("f32", "f64"):
        yield f"div.rn.{t}", f"{t}: {t} {t}", ratio
        yield f"rcp.rn.{t}", f"{t}: {t}", lambda a: ratio(1.0, a)
        yield f"sqrt.rn.{t}", f"{t}: {t}", root(FLOATS[t].precision)
        yield f"copysign.{t}", f"{t}: {t} {t}", lambda a, b: math.copysign(b, a)
    yield "fma.rm.f32", "f32: f32 f32 f32", fused_down
    for name, f in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b), ("mul", lambda a, b: a * b)):
        yield f"{name}.ftz.f32", "f32: f32 f32", flushed(lambda a, b, f=f: exact(f, a, b))
        yield f"{name}.rn.ftz.f32", "f32: f32 f32", flushed(lambda a, b, f=f: exact(f, a, b))
        yield f"{name}.f32x2", "f32x2: f32x2 f32x2", each_half("f32", lambda a, b, f=f: exact(f, a, b))
    yield "fma.rn.ftz.f32", "f32: f32 f32 f32", flushed(fused)
    yield "fma.rn.f32x2", "f32x2: f32x2 f32x2 f32x2", each_half("f32", fused)
    yield "neg.ftz.f32", "f32: f32", flushed(lambda a: -a)
    yield "abs.ftz.f32", "f32: f32", flushed(abs)
    for t in ("f16", "bf16"):  # from sm_100 on, one operand may be fp16 or bf16
        yield f"add.f32.{t}", f"f32: {t} f32", lambda a, b: exact(lambda a, b: a + b, a, b)
        yield f"sub.f32.{t}", f"f32: {t} f32", lambda a, b: exact(lambda a, b: a - b, a, b)
        yield f"fma.rn.f32.{t}", f"f32: {t} {t} f32", fused


def conversion_rows():
    integers = ("s8", "u8", *INTEGERS)
    for to, source in itertools.product(integers, integers):
        # A signed result is sign-extended if the register is wider than the type.
        yield f"cvt.{to}.{source}", f"{'b' if to[0] == 'u' else 's'}32: {source}" if width(
            to
        ) < 32 else f"{to}: {source}", lambda a, to=to: decoded(to, a)  # fmt: skip
    roundings = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for t in FLOATS:
        for to, (name, rounding) in itertools.product(("s8", "u8", *INTEGERS), roundings.items()):
            f = to_integer(to, rounding)
            signature = f"{'s' if to[0] == 's' else 'u'}32: {t}" if width(to) < 16 else f"{to}: {t}"
            if signature.startswith("u32"):
                yield f"cvt.{name}.{to}.{t}", signature, lambda a, f=f, t=t: f(a, t == "f64")
            else:
                yield f"cvt.{name}.{to}.{t}", signature, lambda a, f=f, t=t, to=to: decoded(to, f(a, t == "f64"))
        for name, rounding in roundings.items():
            yield f"cvt.{name}.{t}.{t}", f"{t}: {t}", whole(rounding)
        for source in ("s8", "u8", *INTEGERS):
            if not (width(source) == 64 and width(t) == 16):
                yield f"cvt.rn.{t}.{source}", f"{t}: {source}", lambda a: Fraction(a) if a else 0.0
        for to in FLOATS:
            if t != to:
                how = "" if t == "f32" and to == "f64" or width(t) < width(to) else "rn."
                yield f"cvt.{how}{to}.{t}", f"{to}: {t}", lambda a: a
        yield f"cvt.sat.{t}.{t}", f"{t}: {t}", lambda a: min(a, 1.0) if a > 0 else 0.0
    yield "cvt.rn.sat.f16.f32", "f16: f32", lambda a: min(a, 1.0) if a > 0 else 0.0
    for t in ("f16", "bf16"):  # the first operand becomes the upper half

        def pair(a, b, t=t):
            return packed(encoded(t, b), encoded(t, a))

        yield f"cvt.rn.{t}x2.f32", "b32: f32 f32", pair
    yield "cvta.to.global.u64", "b64: b64", lambda a: a
    yield "cvta.global.u64", "b64: b64", lambda a: a


ROWS = [*integer_rows(), *predicate_rows(), *float_rows(), *conversion_rows()]


def cases(kinds):
    """Returns combinations of the types' edge values, as bits; for two and more operands, a selection."""
    generator = random.Random(0)
    columns = []
    for kind in kinds:
        if kind.endswith("x2"):
            halves = edges(kind[:-2])
            n = width(kind[:-2])
            columns.append([packed(*generator.sample(halves, 2), n) for _ in range(60)])
        else:
            columns.append(edges(kind))
    total = math.prod(map(len, columns))
    if total <= MOST_CASES:
        return list(itertools.product(*columns))
    return [tuple(generator.choice(column) for column in columns) for _ in range(MOST_CASES)]


def register(kind, number):
    letter = "p" if kind == "pred" else {8: "h", 16: "h", 32: "r", 64: "d"}[width_of_register(kind)]
    return f"%{letter}{number}"


def width_of_register(kind):
    return 2 * width(kind[:-2]) if kind.endswith("x2") else width(kind)


def bytes_of(kind):
    return 4 if kind == "pred" else max(2, width_of_register(kind) // 8)


def computed(opcode, results, kinds, rows, bias=0):
    """Returns the bits that an instruction leaves for each row of operands."""
    body, tensors = [], {}
    columns = list(zip(*rows))
    count = -(-len(rows) // 32) * 32
    for k, (kind, column) in enumerate(zip(kinds, columns), 8):
        size = bytes_of(kind)
        data = b"".join(x.to_bytes(size, "little") for x in column) + bytes(size * (count - len(rows)))
        tensors[f"x{k}"] = torch.frombuffer(
            bytearray(data), dtype={2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        )
        target = "%r0" if kind == "pred" else register(kind, k)
        body.append(f"mad.wide.u32 %d0, %index, {size}, %x{k}; ld.global.b{8 * size} {target}, [%d0];")
        if kind == "pred":
            body.append(f"setp.ne.u32 {register(kind, k)}, %r0, 0;")
    operands = ", ".join(register(kind, k) for k, kind in enumerate(kinds, 8))
    body.append(f"{opcode} {'|'.join(register(kind, k) for k, kind in enumerate(results, 1))}, {operands};")
    for k, kind in enumerate(results, 1):
        size = bytes_of(kind)
        tensors[f"out{k}"] = torch.zeros(count * size // 2, dtype=torch.int16)
        source = register(kind, k)
        if kind == "pred":
            body.append(f"selp.b32 %r{k}, 1, 0, {source};")
            source = f"%r{k}"
        body.append(f"mad.wide.u32 %d0, %index, {size}, %out{k}; st.global.b{8 * size} [%d0], {source};")
    execute("\n".join(body), tensors, grid=count // 32, bias=bias)
    columns = []
    for k, kind in enumerate(results, 1):
        data, size = tensors[f"out{k}"].numpy().tobytes(), bytes_of(kind)
        columns.append([int.from_bytes(data[at : at + size], "little") for at in range(0, len(rows) * size, size)])
    return list(zip(*columns))


@pytest.mark.parametrize("opcode, signature, definition", ROWS, ids=[row[0] for row in ROWS])
def test_result(opcode, signature, definition):
    results, kinds = (part.split() for part in signature.split(":"))
    rows = cases(kinds)
    mode = "down" if ".rm." in opcode else "nearest"
    for row, actual in zip(rows, computed(opcode, results, kinds, rows)):
        operands = [x if kind.endswith("x2") else decoded(kind, x) for kind, x in zip(kinds, row)]
        expected = definition(*operands)
        if expected is UNSPECIFIED:
            continue
        expected = expected if isinstance(expected, tuple) else (expected,)
        for kind, bits, value in zip(results, actual, expected):
            halves = isinstance(value, list)
            parts = (
                zip((bits & (1 << width(kind[:-2])) - 1, bits >> width(kind[:-2])), value)
                if halves
                else [(bits, value)]
            )
            for part, number in parts:
                part_kind = kind.removesuffix("x2")
                # Any NaN is right for fp32, neg and abs, where the ISA leaves its bits open, and for fp64, where they
                # depend on the operands.
                is_open = part_kind in ("f32", "f64") or opcode[:3] in ("neg", "abs")
                if is_open and not isinstance(number, Bits) and number != number:
                    assert math.isnan(decoded(part_kind, part)), (list(map(hex, row)), hex(part))
                else:
                    assert part == encoded(part_kind, number, mode), (list(map(hex, row)), hex(part), number)


# ---- approximations


def relative(most):
    return lambda x, exact: most * abs(exact)


def of_logarithm(x, exact):
    return 2**-22 * (1 if 0.5 < x < 2 else abs(exact))


def two_units(a, exact):
    return 2 * 2.0 ** (max(math.frexp(exact)[1] - 1, -126) - 23)


def usual(f):
    """Returns f, but with None for an argument that is not finite or outside of f's domain."""

    def result(*x):
        try:
            return f(*x) if all(map(math.isfinite, x)) else None
        except (ValueError, ZeroDivisionError, OverflowError):
            return None

    return result


# (opcode, exact value in fp64, error that the ISA allows)
APPROXIMATIONS = [
    ("ex2.approx", lambda x: 2.0**x, relative(2**-22)),
    ("lg2.approx", math.log2, of_logarithm),
    ("rcp.approx", lambda x: 1 / x, relative(2**-23)),
    ("sqrt.approx", math.sqrt, relative(2**-23)),
    ("rsqrt.approx", lambda x: 1 / math.sqrt(x), relative(2**-22)),
    ("tanh.approx", math.tanh, relative(2**-11)),
]


@pytest.mark.parametrize("ftz", ("", ".ftz"))
@pytest.mark.parametrize("opcode, f, most", APPROXIMATIONS, ids=[row[0] for row in APPROXIMATIONS])
def test_approximation(opcode, f, most, ftz):
    generator = random.Random(1)
    near_one = [0x3F800000 + generator.randrange(-1 << 16, 1 << 16) for _ in range(64)]
    rows = [(x,) for x in edges("f32") + near_one + [generator.randrange(0x3A000000, 0x43000000) for _ in range(192)]]
    moves = [computed(f"{opcode}{ftz}.f32", ["f32"], ["f32"], rows, bias) for bias in (-1, 0, 1)]
    moved = 0
    for (bits,), *results in zip(rows, *moves):
        x = decoded("f32", bits)
        x = math.copysign(0.0, x) if ftz and abs(x) < 2**-126 else x
        low, middle, high = (decoded("f32", result[0]) for result in results)
        exact_value = usual(f)(x)
        if exact_value is None or not 2**-126 <= abs(exact_value) < 2**127:
            continue
        assert middle == single(exact_value)
        for each in (low, high):
            assert abs(each - exact_value) <= most(x, exact_value) * (1 + 1e-9), x
        if middle != exact_value:
            assert low < exact_value < high
            moved += 1
    assert moved > 100


SPECIAL = [  # (opcode, operand, result) in bits
    ("ex2.approx.ftz.f32", 0x00000001, 0x3F800000), ("ex2.approx.f32", 0xFF800000, 0),
    ("ex2.approx.f32", 0x7F800000, 0x7F800000), ("ex2.approx.ftz.f32", 0xC2FE0000, 0),
    ("ex2.approx.f32", 0xC2FE0000, 0x00400000), ("ex2.approx.f32", 0x80000000, 0x3F800000),
    ("lg2.approx.f32", 0, 0xFF800000), ("lg2.approx.f32", 0x80000000, 0xFF800000),
    ("lg2.approx.ftz.f32", 0x1, 0xFF800000), ("lg2.approx.f32", 0x1, 0xC3150000),
    ("lg2.approx.f32", 0x7F800000, 0x7F800000), ("rcp.approx.f32", 0x80000000, 0xFF800000),
    ("rcp.approx.ftz.f32", 0x80000001, 0xFF800000), ("rcp.approx.ftz.f32", 0x7F000001, 0),
    ("rcp.approx.f32", 0xFF800000, 0x80000000), ("sqrt.approx.f32", 0x80000000, 0x80000000),
    ("rsqrt.approx.f32", 0x80000000, 0xFF800000), ("rsqrt.approx.ftz.f32", 0x80000001, 0xFF800000),
    ("rsqrt.approx.f32", 0x7F800000, 0), ("tanh.approx.f32", 0xFF800000, 0xBF800000),
]  # fmt: skip


@pytest.mark.parametrize("bias", (-1, 0, 1))
def test_approximations_of_zeros_and_infinities(bias):
    for opcode, operand, result in SPECIAL:
        assert computed(opcode, ["b32"], ["b32"], [(operand,)], bias) == [(result,)], opcode
    for opcode in ("ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh"):
        [(bits,)] = computed(f"{opcode}.approx.f32", ["b32"], ["b32"], [(0x7F800001,)], bias)
        assert math.isnan(decoded("f32", bits))
    for opcode in ("lg2", "sqrt", "rsqrt"):
        [(bits,)] = computed(f"{opcode}.approx.f32", ["b32"], ["b32"], [(0xBF800000,)], bias)
        assert math.isnan(decoded("f32", bits))


@pytest.mark.parametrize("opcode", ("div.full.f32", "div.approx.f32", "div.full.ftz.f32", "div.approx.ftz.f32"))
def test_quotient(opcode):
    rows = cases(["f32", "f32"])
    moves = [computed(opcode, ["f32"], ["f32", "f32"], rows, bias) for bias in (-1, 0, 1)]
    moved = 0
    for row, *results in zip(rows, *moves):
        a, b = (decoded("f32", x) for x in row)
        if "ftz" in opcode:
            a, b = (math.copysign(0.0, x) if abs(x) < 2**-126 else x for x in (a, b))
        expected = ratio(a, b)
        if "approx" in opcode and 2**126 < abs(b) < math.inf:
            expected = a * math.copysign(0.0, b)
        if "ftz" in opcode and abs(expected) < 2**-126:
            expected = math.copysign(0.0, a) * math.copysign(1, b)
        values = [decoded("f32", result[0]) for result in results]
        assert values[1] == FLOATS["f32"].value(FLOATS["f32"].encoded(expected)) or math.isnan(expected)
        if isinstance(expected, Fraction) and Fraction(2) ** -120 < abs(expected) < Fraction(2) ** 127:
            assert all(abs(Fraction(x) - expected) <= two_units(None, float(expected)) * (1 + 1e-9) for x in values)
            if Fraction(values[1]) != expected:
                assert values[0] < expected < values[2]
                moved += 1
        else:
            assert all(
                x != x if expected != expected else abs(x - values[1]) < 2**-124 or x == values[1] for x in values
            )
    assert moved > 50


@pytest.mark.parametrize("opcode, f", [("rcp", lambda x: 1 / x), ("rsqrt", lambda x: 1 / math.sqrt(x))])
def test_upper_halves_of_doubles(opcode, f):
    """An fp64 approximation ignores the operand's lower 32 bits and clears the result's."""
    rows = [(x,) for x in edges("f64")]
    for (bits,), (result,) in zip(rows, computed(f"{opcode}.approx.ftz.f64", ["f64"], ["f64"], rows)):
        x, value = decoded("f64", bits >> 32 << 32), decoded("f64", result)
        x = math.copysign(0.0, x) if abs(x) < 2**-1022 else x
        if x == 0:
            assert value == math.copysign(math.inf, x)
        elif (exact_value := usual(f)(x)) is None:
            assert value != value if x != x or x < 0 and opcode == "rsqrt" else value == 0
        elif abs(exact_value) < 2**-1022:
            assert value == 0
        else:
            assert result & 0xFFFFFFFF == 0 and abs(value / exact_value - 1) < 2**-19


def test_reciprocal_root_of_doubles():
    rows = [(x,) for x in edges("f64")]
    for (bits,), (result,) in zip(rows, computed("rsqrt.approx.f64", ["f64"], ["f64"], rows)):
        x, value = decoded("f64", bits), decoded("f64", result)
        if (exact_value := usual(lambda x: 1 / math.sqrt(x))(x)) is not None:
            assert abs(value / exact_value - 1) < 2**-22


# ---- immediates, names, control


def test_each_table_of_lop3():
    body = "mov.u32 %r1, 0xF0F0F0F0; mov.u32 %r2, 0xCCCCCCCC; mov.u32 %r3, 0xAAAAAAAA;\n"
    body += "".join(f"lop3.b32 %r0, %r1, %r2, %r3, {k}; st.global.u32 [%out+{4 * k}], %r0;\n" for k in range(256))
    out = torch.zeros(256, dtype=torch.int32)
    execute(body, {"out": out}, threads=1)
    assert (out.numpy().view(np.uint32) == np.arange(256, dtype=np.uint32) * 0x01010101).all()


def test_constants_and_packing():
    body = """
    mov.b64 %d1, {%r1, 0xDEADBEEF};
    mov.b64 {%r2, _}, %d1;
    mov.b64 {_, %r3}, %d1;
    mov.b32 {%h1, %h2}, %r3;
    mov.b32 %r4, {%h2, %h1};
    mov.b64 {%h3, %h4, %h5, %h6}, %d1;
    mov.b64 %d2, {%h6, %h5, %h4, %h3};
    mov.b64 {%r5, %r6}, %d2;
    xor.b32 %r4, %r4, %r5;
    mov.f32 %r7, 0f3FC00000;
    mov.f64 %d3, 0d3FF8000000000000;
    cvt.rn.f32.f64 %r8, %d3;
    sub.f32 %r9, %r7, %r8;
    add.s32 %r4, %r4, %r9;
    add.s32 %r0, %r4, -7;
    mov.pred %p1, -1;
    @!%p1 mov.u32 %r0, 0;
    and.pred %p1, %p1, 0;
    @%p1 mov.u32 %r0, 0;
    """
    assert lanes(body, range(32)) == [(0xBEEFDEAD ^ 0xBEEFDEAD) - 7] * 32


def test_special_registers():
    body = """
    mov.u32 %r1, %ntid.x; mov.u32 %r2, %ntid.y; mov.u32 %r3, %tid.y; mov.u32 %r4, %tid.z;
    mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ctaid.y; mov.u32 %r7, %nctaid.x; mov.u32 %r8, %nctaid.y;
    mov.u32 %r9, %laneid; mov.u32 %r10, %lanemask_lt; mov.u32 %r11, %lanemask_ge; mov.u32 %r12, %tid.x;
    mov.u32 %r13, %lanemask_eq; mov.u32 %r14, %lanemask_le; mov.u32 %r15, %lanemask_gt; mov.u32 %r16, %ctaid.z;
    mad.lo.s32 %r20, %r4, %r2, %r3; mad.lo.s32 %r20, %r20, %r1, %r12;
    mad.lo.s32 %r21, %r16, %r8, %r6; mad.lo.s32 %r21, %r21, %r7, %r5;
    mad.lo.s32 %r22, %r21, 40, %r20;
    mad.wide.u32 %d0, %r22, 32, %out;
    st.global.v4.b32 [%d0], {%r20, %r21, %r9, %r10};
    st.global.v4.b32 [%d0+16], {%r11, %r13, %r14, %r15};
    """
    out = torch.zeros(2 * 3 * 2 * 40 * 8, dtype=torch.int32)
    kernel = program(body, ["out"])
    machine.run(kernel, machine.Operands([("out", out)]), kernel.pack([out.data_ptr()]), (2, 3, 2), (5, 4, 2))
    thread = np.arange(480) % 40
    lane = (thread % 32).astype(np.uint64)
    below, whole_warp = (np.uint64(1) << lane) - np.uint64(1), np.uint64(0xFFFFFFFF)
    equal = np.uint64(1) << lane
    expected = [
        thread,
        np.arange(480) // 40,
        lane,
        below,
        whole_warp ^ below,
        equal,
        below | equal,
        whole_warp ^ (below | equal),
    ]
    assert (out.numpy().view(np.uint32).reshape(480, 8) == np.stack(expected, 1).astype(np.uint32)).all()


def test_predicated_execution():
    body = "setp.gt.s32 %p1|%p2, %r1, 5;\n mov.u32 %r0, 0;\n @%p1 add.s32 %r0, %r0, %r1;\n @!%p1 sub.s32 %r0, %r0, 1;"
    assert lanes(f"{body} @%p2 add.s32 %r0, %r0, 100;", range(32)) == [x if x > 5 else 99 for x in range(32)]


def test_lanes_leave_a_loop_at_their_time():
    body = """
    mov.u32 %r0, 0; mov.u32 %r2, 0;
LOOP:
    setp.ge.s32 %p1, %r2, %r1;
    @%p1 bra OUT;
    add.s32 %r2, %r2, 1;
    add.s32 %r0, %r0, %r2;
    bra.uni LOOP;
OUT:
    shl.b32 %r0, %r0, 1;
    """
    counts = [(7 * k) % 13 for k in range(32)]
    assert lanes(body, counts) == [n * (n + 1) for n in counts]


def collatz(n):
    steps = 0
    while n != 1:
        n, steps = (3 * n + 1 if n & 1 else n // 2), steps + 1
    return steps


def test_nested_branches_in_a_loop():
    body = """
    mov.u32 %r0, 0;
LOOP: setp.eq.s32 %p1, %r1, 1;
    @%p1 bra OUT;
    and.b32 %r2, %r1, 1;
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra EVEN;
    mad.lo.s32 %r1, %r1, 3, 1;
    bra NEXT;
EVEN: shr.u32 %r1, %r1, 1;
NEXT: add.s32 %r0, %r0, 1;
    bra LOOP;
OUT: bar.warp.sync 0xFFFFFFFF;
    vote.sync.ballot.b32 %r3, %p1, 0xFFFFFFFF;   // they meet again
    not.b32 %r3, %r3;
    add.s32 %r0, %r0, %r3;
    """
    assert lanes(body, range(1, 33)) == [collatz(n) for n in range(1, 33)]


def test_lanes_that_have_left_are_not_waited_for():
    body = """
    setp.lt.u32 %p1, %thread, 20;
    mov.u32 %r0, 7;
    @!%p1 bra GONE;
    shfl.sync.bfly.b32 %r2, %r1, 1, 31, 0xFFFFF;
    mov.u32 %r0, %r2;
GONE:
    """
    assert lanes(body, range(32)) == [k ^ 1 if k < 20 else 7 for k in range(32)]
    early = body.replace("@!%p1 bra GONE;", "@!%p1 ret;").replace("0xFFFFF;", "-1;")
    assert lanes(early, range(32)) == [k ^ 1 if k < 20 else 0 for k in range(32)]


FUNCTIONS = """
.func (.param .b32 back) twice_or_less(.param .b32 x, .param .b64 unused)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    ld.param.u32 %r1, [x+0];
    setp.gt.s32 %p1, %r1, 9;
    @%p1 bra LESS;
    shl.b32 %r2, %r1, 1;
    st.param.b32 [back+0], %r2;
    ret;
LESS: sub.s32 %r2, %r1, 1;
    st.param.b32 [back], %r2;
    ret;
}
"""


def test_functions_are_called_where_lanes_have_parted():
    call = """
    {
    .param .b32 p0; .param .b64 p1; .param .b32 r0;
    st.param.b32 [p0], %r1; st.param.b64 [p1], %d1;
    call.uni (r0), twice_or_less, (p0, p1);
    ld.param.b32 %r0, [r0];
    }
    """
    body = f"mov.u64 %d1, 0; mov.u32 %r0, -1; setp.lt.u32 %p1, %r1, 25; @!%p1 bra OUT; {call} OUT: {call * 0}"
    expected = [-1 if x >= 25 else x - 1 if x > 9 else 2 * x for x in range(32)]
    assert lanes(body, range(32), functions=FUNCTIONS) == expected
    with pytest.raises(ValueError, match="not all make"):
        program(body.replace("call.uni", "@%p1 call.uni"), (), FUNCTIONS)


# ---- lanes


def shuffled(mode, values, distance, c):
    """Returns each lane's (value, predicate) of shfl, as the ISA defines it."""
    clamp, segment = c & 31, c >> 8 & 31
    results = []
    for lane in range(32):
        low, high = lane & segment, lane & segment | clamp & ~segment
        source = {
            "up": lane - (distance & 31), "down": lane + (distance & 31), "bfly": lane ^ distance & 31,
            "idx": low | distance & 31 & ~segment,
        }[mode]  # fmt: skip
        inside = source >= high if mode == "up" else source <= high
        results.append((values[source if inside else lane], inside))
    return results


@pytest.mark.parametrize("mode", ("up", "down", "bfly", "idx"))
def test_shuffle(mode):
    values = [3 * k + 1 for k in range(32)]
    for distance, c in itertools.product((0, 1, 3, 16, 31, 33), (0, 31, 0x1F1F, 0x1800, 0x181F, 0x1C07, 5)):
        body = f"shfl.sync.{mode}.b32 %r2|%p1, %r1, {distance}, {c}, -1;"
        body += "selp.b32 %r0, 1000, 0, %p1; add.s32 %r0, %r0, %r2;"
        assert lanes(body, values) == [x + 1000 * inside for x, inside in shuffled(mode, values, distance, c)]
    # Each lane has its own distance.
    assert lanes("shfl.sync.idx.b32 %r0, %r1, %r2, 31, -1;", values, [31 - k for k in range(32)]) == values[::-1]


def test_votes_and_sums_of_lanes():
    values = [(k * 37) % 11 - 5 for k in range(32)]
    mask = sum((x > 0) << k for k, x in enumerate(values))
    for name in ("vote.sync.ballot.b32", "vote.ballot.sync.b32"):
        ballot = lanes(f"setp.gt.s32 %p1, %r1, 0; {name} %r0, %p1, -1;", values)
        assert {x & 0xFFFFFFFF for x in ballot} == {mask}
    some = "setp.gt.s32 %p1, %r1, {}; {} %p2, %p1, -1; selp.b32 %r0, 1, 0, %p2;"
    for name, limits in (("vote.sync.any.pred", (5, 4)), ("vote.sync.all.pred", (-5, -6))):
        assert [lanes(some.format(limit, name), values) for limit in limits] == [[0] * 32, [1] * 32]
    bits = [x & 0xFFFFFFFF for x in values]
    for name, result in {
        "add.s32": sum(values), "min.s32": min(values), "max.s32": max(values), "min.u32": min(bits),
        "max.u32": max(bits), "add.u32": sum(values), "or.b32": np.bitwise_or.reduce(values),
        "and.b32": np.bitwise_and.reduce(values),
    }.items():  # fmt: skip
        assert [x & 0xFFFFFFFF for x in lanes(f"redux.sync.{name} %r0, %r1, -1;", values)] == [
            int(result) & 0xFFFFFFFF
        ] * 32
    # Lanes outside the member mask are left out.
    half = "setp.lt.u32 %p1, %thread, 16; mov.u32 %r0, 0; @%p1 redux.sync.add.s32 %r0, %r1, 0xFFFF;"
    assert lanes(half, range(32)) == [120] * 16 + [0] * 16


def test_a_barrier_that_votes():
    body = """
    setp.eq.s32 %p1, %thread, 70; bar.red.or.pred %p2, 0, %p1; selp.b32 %r0, 1, 0, %p2;
    setp.eq.s32 %p1, %thread, 700; bar.red.or.pred %p2, 0, %p1; selp.b32 %r1, 2, 0, %p2; add.s32 %r0, %r0, %r1;
    add.s64 %d0, %out, %at; st.global.u32 [%d0], %r0;
    """
    out = torch.zeros(96, dtype=torch.int32)
    execute(body, {"out": out}, threads=96, orders=3)
    assert out.tolist() == [1] * 96


# ---- memory


@pytest.mark.parametrize("space", ("global", "shared", "local"))
def test_vectors_and_widths(space):
    """Loads and stores of each width work alone and in vectors, signed and unsigned."""
    place = {"global": "add.s64 %d1, %buffer, %d2;", "shared": "mov.u64 %d1, room; add.s64 %d1, %d1, %d2;"}
    declared = {"shared": ".shared .align 16 .b8 room[2048];", "local": ".local .align 16 .b8 room[64];"}.get(space, "")
    body = f"""
    {declared}
    mul.wide.u32 %d2, %thread, 64;
    {place.get(space, "mov.u64 %d1, room;")}
    mov.b64 %d3, {{%r1, %r1}};
    cvt.u16.u32 %h1, %r1;
    st.{space}.v2.b64 [%d1], {{%d3, %d3}};
    st.{space}.v4.b32 [%d1+16], {{%r1, 1, 2, %r1}};
    st.{space}.v4.u8 [%d1+32], {{%h1, 2, %h1, 3}};
    st.{space}.u16 [%d1+36], %r1;
    st.{space}.v2.u8 [%d1+38], {{%h1, %h1}};
    ld.{space}.v4.u32 {{%r2, %r3, _, %r4}}, [%d1+16];
    ld.{space}.s8 %r5, [%d1+32];
    ld.{space}.u8 %r6, [%d1+34];
    ld.{space}.s16 %r7, [%d1+36];
    ld.{space}.u16 %r8, [%d1+36];
    ld.{space}.s8 %d4, [%d1+38];
    cvt.u32.u64 %r9, %d4;
    ld.{space}.v2.b16 {{%h2, %h3}}, [%d1];
    cvt.u32.u16 %r10, %h3;
    ld.{space}.s32 %d5, [%d1+28];
    shr.s64 %d5, %d5, 32; cvt.u32.u64 %r11, %d5;
    mad.wide.u32 %d6, %thread, 40, %out;
    st.global.v2.b32 [%d6], {{%r2, %r3}}; st.global.v2.b32 [%d6+8], {{%r4, %r5}};
    st.global.v2.b32 [%d6+16], {{%r6, %r7}}; st.global.v2.b32 [%d6+24], {{%r8, %r9}};
    st.global.v2.b32 [%d6+32], {{%r10, %r11}};
    """
    x = np.array([edges("b32")[k % 13] if k < 13 else 0x01020384 * k & 0xFFFFFFFF for k in range(32)], np.uint32)
    tensors = {"x": torch.from_numpy(x.view(np.int32)), "out": torch.zeros(320, dtype=torch.int32)}
    tensors["buffer"] = torch.zeros(2048, dtype=torch.uint8)
    execute(f"add.s64 %d0, %x, %at; ld.global.u32 %r1, [%d0]; {body}", tensors, orders=2)
    s8, s16 = x.astype(np.uint8).view(np.int8).astype(np.int32), x.astype(np.uint16).view(np.int16).astype(np.int32)
    unsigned = (x & 0xFF, x & 0xFFFF)
    expected = [x, np.ones(32), x, s8, unsigned[0], s16, unsigned[1], s8, x >> 16, x.view(np.int32) >> 31]
    assert (
        tensors["out"].numpy().reshape(32, 10) == np.stack([e.astype(np.uint32).view(np.int32) for e in expected], 1)
    ).all()


TYPES = [f"{kind}{n}" for n in (8, 16, 32, 64) for kind in "busf" if (kind, n) not in (("f", 8), ("f", 16))]
WEAK = {"ld": ["global", "global.cg", "global.cs", "global.nc", "shared"], "st": ["global", "global.wb", "shared"]}
STRONG = {"ld": ["global.gpu.acquire", "relaxed.gpu.global", "acquire.gpu.global", "volatile.global"],
          "st": ["relaxed.gpu.global", "release.gpu.global", "volatile.global"]}  # fmt: skip
VECTORS = {"": 1, ".v2": 2, ".v4": 4}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("instruction", ("ld", "st"))
def test_each_access(instruction, kind):
    """An access moves a number from one 16-byte slot to another, and leaves that slot's other bytes as they were."""
    n, letter = width(kind), {8: "h", 16: "h", 32: "r", 64: "d"}[width(kind)]
    accesses = [(where, v) for where in WEAK[instruction] for v in VECTORS if VECTORS[v] * n <= 128]
    for where, vector in accesses + [(where, "") for where in STRONG[instruction]]:
        count = VECTORS[vector]
        registers = [f"%{letter}{k}" for k in range(4, 4 + count)]
        listed = "{" + ", ".join(registers) + "}" if vector else registers[0]
        shared, size = "shared" in where, n // 8
        there, back = ("%r2", "%r2") if shared else ("%d1", "%d2")
        body = "mad.wide.u32 %d1, %thread, 16, %x; mad.wide.u32 %d2, %thread, 16, %out;\n"
        body += ".shared .align 16 .b8 room[512]; mov.u32 %r2, room; mad.lo.s32 %r2, %thread, 16, %r2;\n"
        one_by_one = [(f"[%d1+{k * size}]", register, f"[%d2+{k * size}]") for k, register in enumerate(registers)]
        if instruction == "ld":
            if shared:
                body += "ld.global.v2.b64 {%d20, %d21}, [%d1]; st.shared.v2.b64 [%r2], {%d20, %d21};\n"
            body += f"ld.{where}{vector}.{kind} {listed}, [{there}];\n"
            body += "".join(f"st.global.b{n} {target}, {register};\n" for _, register, target in one_by_one)
        else:
            if shared:
                body += "ld.global.v2.b64 {%d20, %d21}, [%d2]; st.shared.v2.b64 [%r2], {%d20, %d21};\n"
            body += "".join(f"ld.global.b{n} {register}, {source};\n" for source, register, _ in one_by_one)
            body += f"st.{where}{vector}.{kind} [{back}], {listed};\n"
            if shared:
                body += "ld.shared.v2.b64 {%d20, %d21}, [%r2]; st.global.v2.b64 [%d2], {%d20, %d21};\n"
        x = torch.randint(256, (32, 16), dtype=torch.uint8)
        out = torch.full((32, 16), 0xEE, dtype=torch.uint8)
        expected = torch.cat([x[:, : count * size], out[:, count * size :]], 1)
        execute(body, {"x": x, "out": out})
        assert torch.equal(out, expected), (where, vector)


def test_parameters_of_each_width():
    text = """
    .visible .entry kernel(.param .u8 a, .param .u16 b, .param .f32 c, .param .u64 out, .param .align 8 .b8 d[24])
    {
        .reg .b32 %r<8>; .reg .b64 %d<4>; .reg .b16 %h<4>;
        ld.param.u64 %d0, [out];
        ld.param.s8 %r0, [a]; ld.param.u16 %r1, [b]; ld.param.f32 %r2, [c]; ld.param.v2.u32 {%r3, %r4}, [d+8];
        ld.param.u64 %d1, [d+16]; cvt.u32.u64 %r5, %d1;
        st.global.v2.u32 [%d0], {%r0, %r1}; st.global.v2.u32 [%d0+8], {%r2, %r3}; st.global.v2.u32 [%d0+16], {%r4, %r5};
        ret;
    }"""
    kernel, out = machine.Program(text), torch.zeros(6, dtype=torch.int32)
    whole_d = 1 | 2 << 64 | 3 << 96 | 4 << 128
    params = kernel.pack([0x80, 0xFFFE, 0x3F800000, out.data_ptr(), whole_d])
    assert [at for at, _ in kernel.parsed.params.values()] == [0, 2, 4, 8, 16]
    machine.run(kernel, machine.Operands([("out", out)]), params, (1, 1, 1), (1, 1, 1))
    assert out.tolist() == [-128, 0xFFFE, 0x3F800000, 2, 3, 4]


ATOMICS = [  # (opcode, old value, operands, new value)
    ("add.u32", 32, 0xFFFFFFFF, [2], 1), ("add.u64", 64, (1 << 64) - 1, [3], 2),
    ("max.u32", 32, 7, [0x80000000], 0x80000000), ("max.s32", 32, 7, [0x80000000], 7),
    ("min.s32", 32, 7, [0x80000000], 0x80000000), ("min.u32", 32, 7, [0x80000000], 7),
    ("max.u64", 64, 7, [1 << 63], 1 << 63), ("max.s64", 64, 7, [1 << 63], 7), ("min.s64", 64, 7, [1 << 63], 1 << 63),
    ("min.u64", 64, 1 << 63, [1 << 32], 1 << 32), ("exch.b32", 32, 5, [9], 9),
    ("exch.b64", 64, 5, [1 << 40], 1 << 40), ("cas.b32", 32, 5, [5, 9], 9), ("cas.b32", 32, 5, [6, 9], 5),
    ("cas.b64", 64, 1 << 40, [1 << 40, 9], 9), ("and.b32", 32, 0xFF0F, [0x10FF], 0x100F),
    ("or.b32", 32, 0xF0, [0x0F], 0xFF),
]  # fmt: skip


@pytest.mark.parametrize("space", ("global", "shared"))
@pytest.mark.parametrize("name, bits, old, operands, new", ATOMICS)
def test_atomic(space, name, bits, old, operands, new):
    letter = "r" if bits == 32 else "d"
    base = "%x" if space == "global" else "room"
    given = "".join(f"mov.b{bits} %{letter}{k}, {x:#x};\n" for k, x in enumerate(operands, 4))
    registers = ", ".join(f"%{letter}{k}" for k in range(4, 4 + len(operands)))
    body = f"""
    .shared .align 8 .b8 room[8];
    mov.b{bits} %{letter}1, {old:#x}; st.{space}.b{bits} [{base}], %{letter}1;
    {given}
    atom.{space}.{name} %{letter}2, [{base}], {registers};
    ld.{space}.b{bits} %{letter}3, [{base}];
    st.global.b{bits} [%out], %{letter}2; st.global.b{bits} [%out+8], %{letter}3;
    """
    tensors = {"x": torch.zeros(1, dtype=torch.int64), "out": torch.zeros(2, dtype=torch.int64)}
    execute(body, tensors, threads=1)
    assert [x & (1 << 64) - 1 for x in tensors["out"].tolist()] == [old, new]


def test_atomics_of_a_warp_follow_each_other():
    tensors = {"x": torch.tensor([5], dtype=torch.int32), "out": torch.zeros(64, dtype=torch.int32)}
    body = "atom.global.gpu.relaxed.add.u32 %r0, [%x], 1; add.s64 %d0, %out, %at; st.global.u32 [%d0], %r0;"
    execute(body, tensors, grid=2)
    assert sorted(tensors["out"].tolist()) == list(range(5, 69)) and tensors["x"].item() == 69
    execute("red.global.add.u32 [%x], 2;", tensors, grid=2)
    assert tensors["x"].item() == 69 + 128


def test_asynchronous_copies():
    """cp.async: groups end in the order of their commit, and the bytes of the 16 that a copy does not read become 0."""
    body = """
    .shared .align 16 .b8 room[1536];
    mad.wide.u32 %d1, %thread, 16, %x;
    shl.b32 %r1, %thread, 4;
    mov.u32 %r2, room; add.s32 %r2, %r2, %r1;
    cp.async.cg.shared.global [%r2+0], [%d1+0], 16;
    cp.async.commit_group;
    mov.u32 %r3, 8;
    cp.async.ca.shared.global [%r2+512], [%d1+0], 16, %r3;
    cp.async.ca.shared.global [%r2+1024], [%d1+4], 4;
    cp.async.ca.shared.global [%r2+1028], [%d1+0], 0x8, 0;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];
    cp.async.wait_group 0;
    ld.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r2+512];
    ld.shared.b32 %r12, [%r2+1024];
    mad.wide.u32 %d2, %thread, 48, %out;
    st.global.v4.b32 [%d2], {%r4, %r5, %r6, %r7}; st.global.v4.b32 [%d2+16], {%r8, %r9, %r10, %r11};
    st.global.b32 [%d2+32], %r12;
    """.replace("cp.async.ca.shared.global [%r2+1028], [%d1+0], 0x8, 0;\n", "")
    tensors = {"x": torch.arange(1, 129, dtype=torch.int32), "out": torch.zeros(32 * 12, dtype=torch.int32)}
    execute(body, tensors, orders=2)
    x, out = tensors["x"].view(32, 4), tensors["out"].view(32, 12)
    assert torch.equal(out[:, :4], x) and torch.equal(out[:, 4:6], x[:, :2]) and not out[:, 6:8].any()
    assert torch.equal(out[:, 8], x[:, 1])


# ---- matrices


def halves_of(kind, *shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-8, 9, shape, generator=generator).to({"f16": torch.float16, "bf16": torch.bfloat16}[kind])


@pytest.mark.parametrize("kind", ("f16", "bf16"))
def test_product_of_a_warp(kind):
    """mma.m16n8k16 gives the matrix product. Its registers are laid out as in the ISA: a lane holds row lane / 4,
    columns 2 (lane % 4) and 2 (lane % 4) + 1."""
    a, b, c = halves_of(kind, 16, 16), halves_of(kind, 16, 8), torch.randint(-99, 99, (16, 8)).float()
    body = f"""
    shr.u32 %r20, %thread, 2; and.b32 %r21, %thread, 3;
    mad.lo.s32 %r22, %r20, 32, 0; mad.lo.s32 %r22, %r21, 4, %r22; cvt.u64.u32 %d1, %r22; add.s64 %d1, %a, %d1;
    ld.global.b32 %r1, [%d1]; ld.global.b32 %r2, [%d1+256]; ld.global.b32 %r3, [%d1+16]; ld.global.b32 %r4, [%d1+272];
    cvt.u64.u32 %d2, %r22; add.s64 %d2, %b, %d2;
    ld.global.b32 %r5, [%d2]; ld.global.b32 %r6, [%d2+16];
    cvt.u64.u32 %d3, %r22; shl.b64 %d4, %d3, 0; mad.wide.u32 %d3, %r21, 8, %c; mad.wide.u32 %d3, %r20, 32, %d3;
    ld.global.v2.b32 {{%r7, %r8}}, [%d3]; ld.global.v2.b32 {{%r9, %r10}}, [%d3+256];
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
        {{%r11, %r12, %r13, %r14}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%r7, %r8, %r9, %r10}};
    st.global.v2.b32 [%d3], {{%r11, %r12}}; st.global.v2.b32 [%d3+256], {{%r13, %r14}};
    """
    expected = a.double() @ b.double() + c.double()
    execute(body, {"a": a, "b": b.T.contiguous(), "c": c})
    assert torch.equal(c.double(), expected)


@pytest.mark.parametrize("transposed", ("", ".trans"))
@pytest.mark.parametrize("count", (1, 2, 4))
def test_matrices_to_and_from_shared_memory(count, transposed):
    """ldmatrix reads rows 48 bytes apart, lane k giving the address of row k, and stmatrix writes them back."""
    registers = "{" + ", ".join(f"%r{k}" for k in range(1, count + 1)) + "}"
    body = f"""
    .shared .align 16 .b8 room[4096];
    mov.u32 %r20, room; mad.lo.s32 %r21, %thread, 48, %r20;
    mad.wide.u32 %d1, %thread, 16, %x;
    ld.global.v4.b32 {{%r22, %r23, %r24, %r25}}, [%d1];
    st.shared.v4.b32 [%r21], {{%r22, %r23, %r24, %r25}};
    ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {registers}, [%r21];
    stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%r21+2048], {registers};
    mad.wide.u32 %d2, %thread, 4, %out;
    """
    body += "".join(f"st.global.b32 [%d2+{128 * k}], %r{k + 1};" for k in range(count))
    body += f"""
    setp.ge.u32 %p1, %thread, {8 * count};
    @%p1 ret;
    ld.shared.v4.b32 {{%r22, %r23, %r24, %r25}}, [%r21+2048];
    mad.wide.u32 %d1, %thread, 16, %back; st.global.v4.b32 [%d1], {{%r22, %r23, %r24, %r25}};
    """
    x = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    tensors = {
        "x": x,
        "out": torch.zeros(count, 8, 8, dtype=torch.int16),
        "back": torch.zeros(count, 8, 8, dtype=torch.int16),
    }
    execute(body, tensors)
    x = x[:count]
    assert torch.equal(tensors["out"], x.transpose(1, 2) if transposed else x)
    assert torch.equal(tensors["back"], x)


def tile_in_memory(matrix, swizzle, transposed):
    """Returns (bytes, strides) of a (rows, 16) operand of wgmma in shared memory; the product sums over the 16 columns.

    The bytes form atoms of 8 lines of `swizzle` bytes, and line i's 16-byte pieces are permuted by i. A line runs along
    the summed dim or, if transposed, along the rows."""
    lines = matrix.T.contiguous() if transposed else matrix.contiguous()  # (across, along)
    across, along = lines.shape
    wide = swizzle // 2
    atoms_along = max(1, along // wide)
    leading, stride = 8 * swizzle * (across // 8), 8 * swizzle
    memory = np.zeros(atoms_along * leading // 2, np.int16)
    data = lines.view(torch.int16).numpy()
    for line, place in itertools.product(range(across), range(along)):
        at = place // wide * leading + line // 8 * stride + line % 8 * swizzle + place % wide * 2
        at ^= (at >> 7 & swizzle // 16 - 1) << 4
        memory[at // 2] = data[line, place]
    return memory, leading, stride


@pytest.mark.parametrize("kind", ("f16", "bf16"))
# An operand in registers cannot be transposed.
@pytest.mark.parametrize(
    "a_in_registers, a_transposed, b_transposed", [x for x in itertools.product((0, 1), repeat=3) if x[:2] != (1, 1)]
)
def test_product_of_four_warps(kind, a_in_registers, a_transposed, b_transposed):
    """wgmma.m64n128k16 gives the matrix product, with operands in shared memory in 128-byte lines. If A is in
    registers, a warp holds its 16 rows laid out as for mma."""
    a, b = halves_of(kind, 64, 16), halves_of(kind, 128, 16)
    c = torch.randint(-99, 99, (64, 128)).float()
    memory_a, leading_a, stride_a = tile_in_memory(a, 128, a_transposed)
    memory_b, leading_b, stride_b = tile_in_memory(b, 128, b_transposed)
    start_b = memory_a.nbytes
    descriptor = [
        1 << 62 | stride // 16 << 32 | leading // 16 << 16
        for leading, stride in ((leading_a, stride_a), (leading_b, stride_b))
    ]
    words = (memory_a.nbytes + memory_b.nbytes) // 4
    results = [f"%r{k}" for k in range(1, 65)]
    body = f"""
    .shared .align 1024 .b8 room[{4 * words}];
    mov.u32 %r70, room; mad.lo.s32 %r70, %thread, 4, %r70; add.s64 %d1, %memory, %at;
    """
    body += "".join(
        f"ld.global.b32 %r71, [%d1+{512 * k}]; st.shared.b32 [%r70+{512 * k}], %r71;\n" for k in range(words // 128)
    )
    body += "fence.proxy.async.shared::cta; bar.sync 0;\n"
    # address of D's row 16 warp + lane / 4, column 2 (lane % 4)
    body += "shr.u32 %r72, %thread, 5; and.b32 %r73, %thread, 31; shr.u32 %r74, %r73, 2; and.b32 %r73, %r73, 3;\n"
    body += "mad.lo.s32 %r72, %r72, 16, %r74; mad.wide.u32 %d2, %r72, 512, %c; mad.wide.u32 %d2, %r73, 8, %d2;\n"
    for k in range(0, 64, 4):
        at = k // 4 * 32
        body += f"ld.global.v2.b32 {{{results[k]}, {results[k + 1]}}}, [%d2+{at}];"
        body += f"ld.global.v2.b32 {{{results[k + 2]}, {results[k + 3]}}}, [%d2+{at + 4096}];\n"
    body += f"mov.b64 %d3, {descriptor[0]:#x}; mov.b64 %d4, {descriptor[1] | start_b // 16:#x};\n"
    body += "mad.wide.u32 %d5, %r72, 32, %a; mad.wide.u32 %d5, %r73, 4, %d5; ld.global.b32 %r75, [%d5];"
    body += "ld.global.b32 %r76, [%d5+256]; ld.global.b32 %r77, [%d5+16]; ld.global.b32 %r78, [%d5+272];\n"
    source = "{%r75, %r76, %r77, %r78}" if a_in_registers else "%d3"
    turned = f"{b_transposed}" if a_in_registers else f"{a_transposed}, {b_transposed}"
    body += f"""
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n128k16.f32.{kind}.{kind}
        {{{", ".join(results)}}}, {source}, %d4, 1, -1, 1, {turned};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    """
    for k in range(0, 64, 4):
        at = k // 4 * 32
        body += f"st.global.v2.b32 [%d2+{at}], {{{results[k]}, {results[k + 1]}}};"
        body += f"st.global.v2.b32 [%d2+{at + 4096}], {{{results[k + 2]}, {results[k + 3]}}};\n"
    memory = torch.from_numpy(np.concatenate([memory_a, memory_b]))
    expected = c.double() - a.double() @ b.double().T
    execute(body, {"memory": memory, "a": a, "c": c}, threads=128)
    assert torch.equal(c.double(), expected)


# ---- what is refused

REFUSED = [
    ("add.s32 %r1, %r2;", "with 2 operands"), ("add.s32 %r1, %r2, %r3, %r4;", "with 4 operands"),
    ("add.q32 %r1, %r2, %r3;", "add.q32"), ("frobnicate;", "frobnicate"), ("add.s32 %r1, %r2, %nothing;", "%nothing"),
    ("add.s32 %r1, %r2, 1.5;", "1.5"), (".frobnicate 3;", "frobnicate"), ("add.s32 %r1, %r2, %d1;", "64 bits"),
    ("add.s32 %r1, %r2, %h1;", "16 bits"), ("add.s64 %d1, %d2, %r1;", "32 bits"),
    ("add.s32 %d1, %r1, %r2;", "64 bits"), ("add.f32 %r1, %r2, %p1;", "0 bits"),
    ("setp.eq.s32 %r1, %r2, %r3;", "32 bits"), ("selp.b32 %r1, %r2, %r3, %r4;", "32 bits"),
    ("shl.b64 %d1, %d2, %d3;", "64 bits"), ("mul.wide.s32 %r1, %r2, %r3;", "32 bits"),
    ("mad.wide.s32 %d1, %r2, %r3, %r4;", "32 bits"), ("cvt.u64.u32 %r1, %r2;", "32 bits"),
    ("cvt.u32.u64 %r1, %r2;", "32 bits"), ("cvt.f32.f16 %r1, %r2;", "32 bits"),
    ("ld.global.b32 %h1, [%d1];", "16 bits"), ("ld.global.b32 %r1, [%r2];", "32 bits"),
    ("st.global.b64 [%d1], %r1;", "32 bits"), ("ld.global.v2.b32 {%r1, %r2, %r3}, [%d1];", "with 4 operands"),
    ("atom.global.add.f32 %r1, [%d1], %r2;", "atom.global.add.f32"),
    ("atom.global.add.u32 %r1, [%d1], %d2;", "64 bits"), ("atom.global.cta.add.u32 %r1, [%d1], %r2;", "cta"),
    ("mov.b64 %d1, {%h1, %h2};", "16 bits"), ("mov.b64 {%r1, %r2}, %r3;", "32 bits"),
    ("mov.b32 %r1, %d1;", "64 bits"), ("popc.b64 %d1, %d2;", "64 bits"),
    ("prmt.b32 %r1, %r2, %r3;", "with 3 operands"), ("lop3.b32 %r1, %r2, %r3, %r4, %r5;", "32 bits"),
    ("@%r1 add.s32 %r1, %r2, %r3;", "no predicate"), ("bra NOWHERE;", "NOWHERE"), ("bar.sync 1;", "bar.sync 1"),
    ("bar.sync 0, 64;", "with 2 operands"), ("bar.sync %r1;", "32 bits"),
    ("shfl.sync.idx.b32 %r1, %r2, 0, 31;", "with 5 operands"),
    ("cp.async.ca.shared.global [%r1], [%d1], %r2;", "32 bits"), ("call.uni nothing, ();", "nothing"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}, {%r1,%r2}, {%r1,%r2}, {%r1,%r2};", "with 7 operands"),
    ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r2];", "with 2 operands"), ("!!;", "!!"),
]  # fmt: skip


@pytest.mark.parametrize("statement, name", REFUSED)
def test_refused(statement, name):
    with pytest.raises((ValueError, KeyError), match=name.replace("%", "[%]").replace(".", "[.]")):
        program(statement)


def test_registers_that_are_wider_than_the_type():
    """ld, st and cvt may use registers wider than the type. A load extends the sign; a store writes the lower part."""
    body = """
    cvt.u64.u32 %d1, %r1; shl.b64 %d1, %d1, 32; or.b64 %d1, %d1, 0x1234;
    cvt.s32.s16 %r2, %d1;
    cvt.s16.s8 %r3, %r1;
    st.global.u16 [%out], %d1;
    add.s32 %r0, %r2, %r3;
    """
    values = [0x80 + k for k in range(32)]
    assert lanes(body, values) == [0x1234 + decoded("s8", x) for x in values]

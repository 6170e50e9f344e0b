"""Instructions of the executor against what the PTX ISA says of them, on numbers at the edges of their types."""

import itertools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.kernels.executed import machine
from tests.kernels.executed.handwritten import execute, lanes, needs_compiler, program
from tests.kernels.executed.numbers_of_ptx import FLOATS, decoded, edges, exact, float_of_bits, packed, single, width

pytestmark = needs_compiler
MOST_CASES = 600
UNSPECIFIED = object()
INTEGERS = "s16 u16 s32 u32 s64 u64".split()


class Bits(int):
    """A result whose bits count, though it may be a NaN."""


def quotient(a, b):
    """Rounded to zero; by zero it is unspecified."""
    return UNSPECIFIED if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a, b):
    return UNSPECIFIED if b == 0 else a - b * quotient(a, b)


def bit_field(bits, signed):
    """bfe, as the ISA writes it, bit by bit."""

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
    """prmt: bytes that four digits choose; the highest bit of a digit asks for the byte's sign alone."""
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
    """A sum that is exactly zero is -0 when it is rounded down, but for +0 and +0."""
    result = fused(a, b, c)
    positive = math.copysign(1, a) * math.copysign(1, b) > 0 and math.copysign(1, c) > 0
    return result if result else 0.0 if positive else -0.0


def ratio(a, b):
    if b == 0 or not math.isfinite(a) or not math.isfinite(b):
        with np.errstate(all="ignore"):
            return float(np.float64(a) / np.float64(b))
    return exact(lambda a, b: a / b, a, b)


def root(precision):
    """The square root, with enough bits that it is rounded once: an odd last bit says that more follow."""

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
    """Rounded to a whole number that stays a float: a zero keeps its sign."""
    return lambda a: a if not math.isfinite(a) else float(rounding(a)) if rounding(a) else math.copysign(0.0, a)


def each_half(kind, f):
    """A packed instruction, half by half."""
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
UNORDERED = {f"{name}u": name for name in COMPARISONS}
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
    # q is of the opposite comparison, and combined with c as well
    for name, f in COMBINED.items():
        yield f"setp.lt.{name}.s32", "pred pred: s32 s32 pred", lambda a, b, c, f=f: (f(a < b, c), f(a >= b, c))
        yield f"setp.gtu.{name}.f32", "pred pred: f32 f32 pred", lambda a, b, c, f=f: (f(not a <= b, c), f(a <= b, c))
    yield "setp.eq.s64", "pred pred: s64 s64", lambda a, b: (a == b, a != b)
    for t in ("f16", "bf16"):  # of a pair, p is of the low halves and q of the high ones

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
    for t in ("f16", "bf16"):  # of sm_100: one operand is a half
        yield f"add.f32.{t}", f"f32: {t} f32", lambda a, b: exact(lambda a, b: a + b, a, b)
        yield f"sub.f32.{t}", f"f32: {t} f32", lambda a, b: exact(lambda a, b: a - b, a, b)
        yield f"fma.rn.f32.{t}", f"f32: {t} {t} f32", fused


def conversion_rows():
    integers = ("s8", "u8", *INTEGERS)
    for to, source in itertools.product(integers, integers):
        # what is left of it is extended by its sign into a register that is wider than the type
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
    for t in ("f16", "bf16"):  # the first operand is the upper half

        def pair(a, b, t=t):
            return packed(encoded(t, b), encoded(t, a))

        yield f"cvt.rn.{t}x2.f32", "b32: f32 f32", pair
    yield "cvta.to.global.u64", "b64: b64", lambda a: a
    yield "cvta.global.u64", "b64: b64", lambda a: a


ROWS = [*integer_rows(), *predicate_rows(), *float_rows(), *conversion_rows()]


def cases(kinds):
    """Combinations of edges, as bits; of pairs, some."""
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
    """The bits that an instruction leaves for each row of operands."""
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
                # Which NaN it is, the ISA leaves open for fp32 and signs; of fp64 it depends on the operands.
                is_open = part_kind in ("f32", "f64") or opcode[:3] in ("neg", "abs")
                if is_open and not isinstance(number, Bits) and number != number:
                    assert math.isnan(decoded(part_kind, part)), (list(map(hex, row)), hex(part))
                else:
                    assert part == encoded(part_kind, number, mode), (list(map(hex, row)), hex(part), number)

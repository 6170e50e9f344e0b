"""The functions of one operand: below a floor, where they overflow, at the bounds of an arc."""

import functools
import math

import torch

import safeops
from safeops.testing import Bad, Sample
from tests.ops.bad_calls import X, bad_dtypes, bad_fill_values, bad_floors
from tests.ops.gpu import Case, keep, numbers
from tests.ops.operands import data, plain
from tests.ops.record import NO_MASK, NO_SUM, NO_WEIGHT, ONE_OPERAND, Record
from tests.ops.truth import floor

# ---- definitions


def select(f, operands, stand_in, instead, out_dtype, neutral=0.5):
    """Returns f(*operands), but `instead` where `stand_in` is True, and out_dtype's largest number, with gradient 0,
    where finite operands overflow."""
    inner = [torch.where(stand_in, neutral, x) for x in operands]
    raw = f(*inner).detach()
    finite = torch.stack(torch.broadcast_tensors(*(x.isfinite() for x in inner))).all(0)
    over = raw.to(out_dtype).isinf() & finite & ~stand_in
    value = f(*(torch.where(over, neutral, x) for x in inner))
    largest = torch.full_like(raw, torch.finfo(out_dtype).max).copysign(raw)
    return torch.where(stand_in, instead, torch.where(over, largest, value))


def _below(x, eps, out_dtype):
    """Returns (where the floor applies: x < eps, or x == 0; eps)."""
    eps = floor(eps, out_dtype)
    return (x < eps) | (x == 0), eps


def _fits(value, out_dtype):
    return max(-torch.finfo(out_dtype).max, min(torch.finfo(out_dtype).max, value))


def safe_reciprocal(input, *, eps=None, fill_value=0.0, out_dtype=torch.float64):
    none, _ = _below(input.abs(), eps, out_dtype)
    return select(lambda x: 1 / x, [input], none, _fits(fill_value, out_dtype), out_dtype)


def safe_log(input, *, eps=None, out_dtype=torch.float64):
    none, eps = _below(input, eps, out_dtype)
    return select(torch.log, [input], none, math.log(eps), out_dtype)


def safe_sqrt(input, *, eps=None, out_dtype=torch.float64):
    none, _ = _below(input, eps, out_dtype)
    root = torch.where(input > 0, input, 0).detach().sqrt().clamp(max=torch.finfo(out_dtype).max)
    return select(torch.sqrt, [input], none, root, out_dtype)


def safe_rsqrt(input, *, eps=None, out_dtype=torch.float64):
    none, eps = _below(input, eps, out_dtype)
    return select(lambda x: x**-0.5, [input], none, _fits(eps**-0.5, out_dtype), out_dtype)


def safe_exp(input, *, out_dtype=torch.float64):
    return select(torch.exp, [input], torch.zeros_like(input, dtype=torch.bool), 0.0, out_dtype)


def safe_acos(input, *, out_dtype=torch.float64):
    # Kahan's 2 atan(sqrt(1 - x) / sqrt(1 + x)) loses no digits near the bounds, nor does its derivative
    outside = input.abs() >= 1
    x = torch.where(outside, 0.5, input)
    angle = 2 * torch.atan2((1 - x).sqrt(), (1 + x).sqrt())
    return torch.where(outside, torch.full_like(input, math.pi) * (input < 0), angle)


def safe_asin(input, *, out_dtype=torch.float64):
    outside = input.abs() >= 1
    x = torch.where(outside, 0.5, input)
    angle = torch.atan2(x, (1 - x).sqrt() * (1 + x).sqrt())
    return torch.where(outside, torch.full_like(input, math.pi / 2).copysign(input).detach(), angle)


def safe_acosh(input, *, out_dtype=torch.float64):
    outside = input <= 1
    infinite = input == math.inf
    x = torch.where(outside | infinite, 2.0, input)
    # log(x + sqrt((x - 1)(x + 1))), with x factored out: the root does not overflow, and nothing cancels
    value = x.log() + ((x - 1) / x * (1 + 1 / x)).sqrt().log1p()
    value = torch.where(infinite, torch.where(infinite, input, 1.0).log(), value)
    return torch.where(outside, torch.zeros_like(input), value)


def log1mexp(input, *, out_dtype=torch.float64):
    eps = floor(None, out_dtype)
    none, near = input > -eps, input > -1
    x = torch.where(none, -1.0, input)
    # log(1 - e^x) = x / 2 + log(2 sinh(-x / 2)) does not cancel near 0; far below it is log1p(-e^x)
    half = torch.where(near, x / 2, -1.0)
    value = torch.where(near, half + (-2 * half.sinh()).log(), torch.log1p(-torch.where(near, -1.0, x).exp()))
    return torch.where(none, math.log(eps), value)


# ---- records

# Values that smooth samples lack: every op's stand-ins, and numbers that saturate some ops.
HURTS = [0.0, -0.0, -1.0, 1.0, 1e-7, -2e-7, 6e-5, 3e4, -3e4, 12.0, 0.25, -1.5, 0.999, -0.999, 2.0]


def bad_inputs(name, *rest):
    yield Bad(([1.0], *rest), {}, TypeError, (name, "input", "tensor", "list"))
    yield Bad((2.0, *rest), {}, TypeError, (name, "input", "tensor", "float"))
    yield Bad((X.to(torch.complex64), *rest), {}, TypeError, (name, "input", "real", "torch.complex64"))


def _gpu(name, floored, low, high):
    """Returns a maker of GPU calls. floored: operands are 0 (for stand-ins) or at least 0.25, so that gradients fit
    fp16; eps is given, as its default depends on the dtype. Else: operands from below `low` to above `high`."""

    def make(n, dtype, seed):
        x = numbers(n, dtype, seed)
        centred = (low + high) / 2 + x.clamp(-4, 4) / 4 * 0.75 * (high - low)
        x = torch.where(keep(n, seed), x.abs() + 0.25, 0) if floored else centred
        return Case(functools.partial(getattr(safeops, name), **({"eps": 2.0**-6} if floored else {})), (x,))

    return make


def _unary(definition, twin, low=-3.0, high=3.0, floored=None, positive=False, dtype_argument=True):
    """Makes a record. low, high: range of a smooth sample. floored: options of a sample with a floor. positive: the op
    refuses eps=0."""
    name, hurts = definition.__name__, torch.tensor(HURTS, dtype=torch.float64).reshape(3, 5)
    samples = [
        Sample((data(3, 5, low=low, high=high),), name="plain", slow=True),
        Sample((hurts,), name="stand-ins", smooth=False, slow=True),
        Sample((data(2, 3, 4, 5, low=low, high=high),), name="four dimensions"),
    ]
    operand = plain() if low <= 0.25 < high else data(5, 6, low=low, high=high).float()
    bad, call = [*bad_inputs(name)], {"input": operand}
    if floored:
        samples.append(Sample((data(3, 5, low=-1.0, high=high),), floored, name="floor", smooth=False))
        bad += bad_floors(name, X, positive=positive)
        call["eps"] = 0.5
    if floored and "fill_value" in floored:
        bad += bad_fill_values(name, X, none=False)
        call["fill_value"] = 2.0
    if dtype_argument:
        bad += bad_dtypes(name, X)
        call["dtype"] = None
    Record(
        name,
        definition,
        samples,
        bad_calls=bad,
        call=call,
        gpu=_gpu(name, floored, low, high),
        dtype_rule="safe",
        dtype_argument=dtype_argument,
        finite=True,
        torch_equivalent=lambda x, **_: twin(x),
        skip=NO_SUM | NO_MASK | NO_WEIGHT | ONE_OPERAND,
    )


_unary(safe_reciprocal, torch.reciprocal, 0.25, floored={"eps": 1.0, "fill_value": -7.0})
_unary(safe_log, torch.log, 0.25, floored={"eps": 0.5}, positive=True)
_unary(safe_sqrt, torch.sqrt, 0.0625, floored={"eps": 0.5})
_unary(safe_rsqrt, torch.rsqrt, 0.25, floored={"eps": 0.5}, positive=True)
_unary(safe_exp, torch.exp)
_unary(safe_acos, torch.acos, -0.75, 0.75, dtype_argument=False)
_unary(safe_acosh, torch.acosh, 1.0625, 4.0, dtype_argument=False)
_unary(log1mexp, lambda x: torch.log(-torch.expm1(x)), -3.0, -0.25, dtype_argument=False)
_unary(safe_asin, torch.asin, -0.75, 0.75, dtype_argument=False)

"""The unary and binary functions once more, in plain differentiable torch: in float64 they are the truth."""

import math

import torch

from tests.contract.definitions import TINY


def _below(x, eps, out_dtype):
    """Where a floor holds: below eps, and at 0 in any case."""
    eps = TINY.get(out_dtype, torch.finfo(torch.float32).tiny) if eps is None else eps
    return (x < eps) | (x == 0), eps


def _select(f, operands, stand_in, instead, out_dtype, neutral=0.5):
    """f(*operands); `instead` at the stand-in; the largest number, without a slope, where finite operands overflow."""
    inner = [torch.where(stand_in, neutral, x) for x in operands]
    raw = f(*inner).detach()
    finite = torch.stack(torch.broadcast_tensors(*(x.isfinite() for x in inner))).all(0)
    over = raw.to(out_dtype).isinf() & finite & ~stand_in
    value = f(*(torch.where(over, neutral, x) for x in inner))
    largest = torch.full_like(raw, torch.finfo(out_dtype).max).copysign(raw)
    return torch.where(stand_in, instead, torch.where(over, largest, value))


def _fits(value, out_dtype):
    return max(-torch.finfo(out_dtype).max, min(torch.finfo(out_dtype).max, value))


def safe_reciprocal(input, *, eps=None, fill_value=0.0, out_dtype=torch.float64):
    none, _ = _below(input.abs(), eps, out_dtype)
    return _select(lambda x: 1 / x, [input], none, _fits(fill_value, out_dtype), out_dtype)


def safe_log(input, *, eps=None, out_dtype=torch.float64):
    none, eps = _below(input, eps, out_dtype)
    return _select(torch.log, [input], none, math.log(eps), out_dtype)


def safe_sqrt(input, *, eps=None, out_dtype=torch.float64):
    none, _ = _below(input, eps, out_dtype)
    root = torch.where(input > 0, input, 0).detach().sqrt().clamp(max=torch.finfo(out_dtype).max)
    return _select(torch.sqrt, [input], none, root, out_dtype)


def safe_rsqrt(input, *, eps=None, out_dtype=torch.float64):
    none, eps = _below(input, eps, out_dtype)
    return _select(lambda x: x**-0.5, [input], none, _fits(eps**-0.5, out_dtype), out_dtype)


def safe_exp(input, *, out_dtype=torch.float64):
    return _select(torch.exp, [input], torch.zeros_like(input, dtype=torch.bool), 0.0, out_dtype)


def safe_acos(input, *, out_dtype=torch.float64):
    # Kahan: 2 atan(sqrt(1 - x) / sqrt(1 + x)), which loses nothing near the bounds, nor does its derivative
    outside = input.abs() >= 1
    x = torch.where(outside, 0.5, input)
    angle = 2 * torch.atan2((1 - x).sqrt(), (1 + x).sqrt())
    return torch.where(outside, torch.full_like(input, math.pi) * (input < 0), angle)


def safe_asin(input, *, out_dtype=torch.float64):
    outside = input.abs() >= 1
    x = torch.where(outside, 0.5, input)
    angle = torch.atan2(x, (1 - x).sqrt() * (1 + x).sqrt())
    return torch.where(outside, torch.full_like(input, math.pi / 2).copysign(input).detach(), angle)


def safe_pow(input, exponent, *, out_dtype=torch.float64):
    if not isinstance(exponent, torch.Tensor):
        exponent = torch.tensor(exponent, dtype=input.dtype, device=input.device)
    a, b = torch.broadcast_tensors(input, exponent)
    whole = (b == b.round()) | b.isnan() | b.isinf()
    none = (a < 0) & a.isfinite() & ~whole
    fixed = torch.where(none, 1, a).detach().pow(b.detach())
    over = fixed.to(out_dtype).isinf() & a.isfinite() & b.isfinite()
    result = torch.where(none, 0.0, torch.where(over, fixed.sign() * torch.finfo(out_dtype).max, fixed))
    live = ~none & ~over & ~((a == 0) & ((b < 1) | ~whole))
    a = torch.where(live, a, 1.0)
    slope = (b * a.abs().pow(b - 1)).detach()
    # a^b as e^(b log|a|), rounding aside, where a slope beyond float64 stands for one of b times a finite power over a
    steep = live & slope.isinf() & a.isfinite() & b.isfinite()
    for below_zero in (True, False):  # there |a|^b, with the sign of an odd power, and no slope by b
        at = live & (a < 0) if below_zero else live & ~(a < 0)
        x, y = torch.where(at, a, 1), torch.where(at, b, 1)
        odd = torch.ones_like(y)
        if below_zero:
            flip = ~y.isnan() & at
            odd = torch.where(flip & (y.remainder(2) == 1), -1.0, odd)
            x, y = torch.where(flip, -x, x), y.detach()
        log = torch.where(steep, y, 1) * torch.where(steep, x, 1).log()
        rough = (log - log.detach()).exp() * torch.where(steep & at, fixed, 1)
        zero = (x == 0) | (steep & at)
        plain = torch.where(zero, 1, x).pow(torch.where(zero, 1, y)) * odd
        # A base of 0 has no gradient to its exponent.
        plain = torch.where(x == 0, torch.where(x == 0, x, 1).pow(torch.where(x == 0, y, 1).detach()), plain)
        result = torch.where(at, torch.where(steep, rough, plain), result)
    return result


def safe_atan2(input, other, *, out_dtype=torch.float64):
    y, x = torch.broadcast_tensors(input, other)
    origin = (y == 0) & (x == 0)
    far = (y.isinf() | x.isinf()) & ~y.isnan() & ~x.isnan()
    value = torch.where(origin, 0.0, torch.atan2(y.detach(), x.detach()))
    y, x = torch.where(origin | far, 0.0, y), torch.where(origin | far, 1.0, x)
    power = -torch.frexp(torch.maximum(y.abs(), x.abs()).detach())[1].to(torch.float64)
    for step in (power.div(2, rounding_mode="floor"), (power / 2).ceil()):  # 2^1074 is no float64
        y, x = y * step.exp2(), x * step.exp2()
    return torch.where(origin | far, value, torch.atan2(y, x))


def xlogy(input, other):
    if not isinstance(other, torch.Tensor):
        other = torch.tensor(other, dtype=input.dtype, device=input.device)
    none = (input == 0) & ~((other > 0) & other.isfinite())
    return torch.where(none, 0.0, torch.where(none, 1.0, input) * torch.where(none, 1.0, other).log())

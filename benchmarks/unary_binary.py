"""The unary and binary functions: each operand read once, the result written once; the rest is arithmetic."""

import torch

import safeops

from .case import Case, data

EPS = 1e-6


def _positive(n, dtype, device, seed):
    return data(n, dtype, device, seed, grad=False).abs_().clamp_(min=0.01).requires_grad_()


def _inside(n, dtype, device, seed):
    return data(n, dtype, device, seed, grad=False).clamp_(-0.95, 0.95).requires_grad_()


def _unary(name, operand, eager, bare, **options):
    """eager: the pattern as most write it first; torch.compile gets it too."""
    ours = getattr(safeops, name)

    def case(n, dtype, device):
        s = dtype.itemsize
        return Case(
            name,
            (operand(n, dtype, device, 0),),
            forward_bytes=2 * s,  # read x; write y
            backward_bytes=3 * s,  # read dy, x; write dx
            ours=lambda x: ours(x, **options),
            eager=eager,
            compiled=next(iter(eager.values())),
            bare=bare,
        )

    return case


def _binary(name, operand, eager, bare):
    ours = getattr(safeops, name)

    def case(n, dtype, device):
        s = dtype.itemsize
        return Case(
            name,
            (operand(n, dtype, device, 0), operand(n, dtype, device, 1)),
            forward_bytes=3 * s,  # read a, b; write y
            backward_bytes=5 * s,  # read dy, a, b; write da, db
            ours=ours,
            eager=eager,
            compiled=next(iter(eager.values())),
            bare=bare,
        )

    return case


def safe_pow_number(n, dtype, device):
    s = dtype.itemsize
    return Case(
        "safe_pow_number",
        (_positive(n, dtype, device, 0),),
        forward_bytes=2 * s,  # read x; write y
        backward_bytes=3 * s,  # read dy, x; write dx
        ours=lambda x: safeops.safe_pow(x, 1.5),
        eager={"x.clamp(min=eps) ** p": lambda x: x.clamp(min=EPS) ** 1.5},
        compiled=lambda x: x.clamp(min=EPS) ** 1.5,
        variant=True,
        bare=lambda x: torch.pow(x, 1.5),
    )


OPS = {
    "safe_reciprocal": _unary(
        "safe_reciprocal",
        data,
        {
            "where(|x| < eps, 0, 1 / x)": lambda x: torch.where(x.abs() < EPS, 0, 1 / x),
            "1 / (x + eps)": lambda x: 1 / (x + EPS),
        },
        None,
        eps=EPS,
    ),
    "safe_log": _unary(
        "safe_log",
        _positive,
        {
            "log(x.clamp(min=eps))": lambda x: torch.log(x.clamp(min=EPS)),
            "log(x + eps)": lambda x: torch.log(x + EPS),
        },
        torch.log,
        eps=EPS,
    ),
    "safe_sqrt": _unary(
        "safe_sqrt",
        _positive,
        {
            "sqrt(x.clamp(min=eps))": lambda x: torch.sqrt(x.clamp(min=EPS)),
            "sqrt(x + eps)": lambda x: torch.sqrt(x + EPS),
        },
        None,
        eps=EPS,
    ),
    "safe_rsqrt": _unary(
        "safe_rsqrt",
        _positive,
        {
            "rsqrt(x.clamp(min=eps))": lambda x: torch.rsqrt(x.clamp(min=EPS)),
            "rsqrt(x + eps)": lambda x: torch.rsqrt(x + EPS),
        },
        None,
        eps=EPS,
    ),
    "safe_exp": _unary("safe_exp", data, {"exp(x.clamp(max=top))": lambda x: torch.exp(x.clamp(max=11))}, torch.exp),
    "safe_acos": _unary(
        "safe_acos",
        _inside,
        {"acos(x.clamp(-1 + eps, 1 - eps))": lambda x: torch.acos(x.clamp(-1 + 1e-2, 1 - 1e-2))},
        torch.acos,
    ),
    "safe_asin": _unary(
        "safe_asin",
        _inside,
        {"asin(x.clamp(-1 + eps, 1 - eps))": lambda x: torch.asin(x.clamp(-1 + 1e-2, 1 - 1e-2))},
        torch.asin,
    ),
    "safe_pow": _binary(
        "safe_pow", _positive, {"x.clamp(min=eps) ** y": lambda x, y: x.clamp(min=EPS) ** y}, torch.pow
    ),
    "safe_pow_number": safe_pow_number,
    "safe_atan2": _binary(
        "safe_atan2",
        data,
        {
            "atan2(y, where(|x| + |y| == 0, 1, x))": lambda y, x: torch.atan2(
                y, torch.where(x.abs() + y.abs() == 0, 1, x)
            ),
            "atan2(y, x + eps)": lambda y, x: torch.atan2(y, x + EPS),
        },
        torch.atan2,
    ),
    "xlogy": _binary(
        "xlogy",
        _positive,
        {
            "where(x == 0, 0, x * log(y))": lambda x, y: torch.where(x == 0, 0, x * torch.log(y)),
            "xlogy(x, y)": torch.xlogy,
        },
        torch.xlogy,
    ),
}

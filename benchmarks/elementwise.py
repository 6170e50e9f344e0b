"""Cases of the elementwise functions: each reads its operands once and writes its result once."""

import torch

import safeops

from .case import Case, case, data, keep_mask

EPS = 1e-6


@case("masked_fill")
def masked_fill(n, dtype, device):
    s = dtype.itemsize
    fill = ~keep_mask(n, device)

    def write(x):
        y = x.clone()
        y[fill] = 0.0
        return y

    return Case(
        (data(n, dtype, device, 0),),
        forward_bytes=2 * s + 1,  # read x, mask; write y
        backward_bytes=2 * s + 1,  # read dy, mask; write dx
        ours=lambda x: safeops.masked_fill(x, fill, 0.0),
        eager={"y = x.clone(); y[m] = 0": write, "x.masked_fill(m, 0)": lambda x: x.masked_fill(fill, 0.0)},
        compiled=lambda x: x.masked_fill(fill, 0.0),
        aten=lambda x: torch.masked_fill(x, fill, 0.0),
    )


def _positive(n, dtype, device, seed):
    return data(n, dtype, device, seed, grad=False).abs_().clamp_(min=0.01).requires_grad_()


def _inside(n, dtype, device, seed):
    return data(n, dtype, device, seed, grad=False).clamp_(-0.95, 0.95).requires_grad_()


def _above_one(n, dtype, device, seed):
    return data(n, dtype, device, seed, grad=False).abs_().add_(1.05).requires_grad_()


def _below_zero(n, dtype, device, seed):
    return data(n, dtype, device, seed, grad=False).abs_().add_(0.05).neg_().requires_grad_()


def _function(operands, name, operand, eager, aten, arithmetic, options):
    def builder(n, dtype, device):
        s = dtype.itemsize
        ours = getattr(safeops, name)
        return Case(
            tuple(operand(n, dtype, device, seed) for seed in range(operands)),
            forward_bytes=(operands + 1) * s,  # read the operands; write y
            backward_bytes=(2 * operands + 1) * s,  # read dy and the operands; write their gradients
            ours=lambda *x: ours(*x, **options),
            eager=eager,
            compiled=next(iter(eager.values())),  # the first pattern is the one users write most
            aten=aten,
            arithmetic=arithmetic,
        )

    case(name)(builder)


def unary(name, operand, eager, aten, arithmetic=False, **options):
    _function(1, name, operand, eager, aten, arithmetic, options)


def binary(name, operand, eager, aten, arithmetic=False, **options):
    _function(2, name, operand, eager, aten, arithmetic, options)


unary(
    "safe_reciprocal",
    data,
    {
        "where(|x| < eps, 0, 1 / x)": lambda x: torch.where(x.abs() < EPS, 0, 1 / x),
        "1 / (x + eps)": lambda x: 1 / (x + EPS),
    },
    torch.reciprocal,
    eps=EPS,
)
unary(
    "safe_log",
    _positive,
    {"log(x.clamp(min=eps))": lambda x: torch.log(x.clamp(min=EPS)), "log(x + eps)": lambda x: torch.log(x + EPS)},
    torch.log,
    arithmetic=True,
    eps=EPS,
)
unary(
    "safe_sqrt",
    _positive,
    {"sqrt(x.clamp(min=eps))": lambda x: torch.sqrt(x.clamp(min=EPS)), "sqrt(x + eps)": lambda x: torch.sqrt(x + EPS)},
    torch.sqrt,
    eps=EPS,
)
unary(
    "safe_rsqrt",
    _positive,
    {
        "rsqrt(x.clamp(min=eps))": lambda x: torch.rsqrt(x.clamp(min=EPS)),
        "rsqrt(x + eps)": lambda x: torch.rsqrt(x + EPS),
    },
    torch.rsqrt,
    eps=EPS,
)
unary("safe_exp", data, {"exp(x.clamp(max=top))": lambda x: torch.exp(x.clamp(max=11))}, torch.exp, arithmetic=True)
unary(
    "safe_acos",
    _inside,
    {"acos(x.clamp(-1 + eps, 1 - eps))": lambda x: torch.acos(x.clamp(-1 + 1e-2, 1 - 1e-2))},
    torch.acos,
    arithmetic=True,
)
unary(
    "safe_acosh",
    _above_one,
    {"acosh(x.clamp(min=1 + eps))": lambda x: torch.acosh(x.clamp(min=1 + 1e-2))},
    torch.acosh,
    arithmetic=True,
)
unary(
    "log1mexp",
    _below_zero,
    {"log(1 - exp(x))": lambda x: torch.log(1 - torch.exp(x)), "log1p(-exp(x))": lambda x: torch.log1p(-torch.exp(x))},
    torch.log1p,
    arithmetic=True,
)
unary(
    "safe_asin",
    _inside,
    {"asin(x.clamp(-1 + eps, 1 - eps))": lambda x: torch.asin(x.clamp(-1 + 1e-2, 1 - 1e-2))},
    torch.asin,
    arithmetic=True,
)
binary(
    "safe_div",
    data,
    {
        "where(|b| < eps, 0, a / b)": lambda a, b: torch.where(b.abs() < 1e-4, 0, a / b),
        "a / (b + eps)": lambda a, b: a / (b + 1e-4),
    },
    torch.div,
    eps=1e-4,
)
binary(
    "safe_pow",
    _positive,
    {"x.clamp(min=eps) ** y": lambda x, y: x.clamp(min=EPS) ** y},
    torch.pow,
    arithmetic=True,
)
binary(
    "safe_atan2",
    data,
    {
        "atan2(y, where(|x| + |y| == 0, 1, x))": lambda y, x: torch.atan2(y, torch.where(x.abs() + y.abs() == 0, 1, x)),
        "atan2(y, x + eps)": lambda y, x: torch.atan2(y, x + EPS),
    },
    torch.atan2,
    arithmetic=True,
)
binary(
    "magnitude",
    data,
    {
        "sqrt(x^2 + y^2 + eps)": lambda x, y: torch.sqrt(x * x + y * y + EPS),
        "hypot(x, y)": torch.hypot,
    },
    torch.hypot,
    arithmetic=True,
)
binary(
    "xlogy",
    _positive,
    {
        "where(x == 0, 0, x * log(y))": lambda x, y: torch.where(x == 0, 0, x * torch.log(y)),
        "xlogy(x, y)": torch.xlogy,
    },
    torch.xlogy,
    arithmetic=True,
)


@case("safe_pow_number")
def safe_pow_number(n, dtype, device):
    s = dtype.itemsize
    return Case(
        (_positive(n, dtype, device, 0),),
        forward_bytes=2 * s,  # read x; write y
        backward_bytes=3 * s,  # read dy, x; write dx
        ours=lambda x: safeops.safe_pow(x, 1.5),
        eager={"x.clamp(min=eps) ** p": lambda x: x.clamp(min=EPS) ** 1.5},
        compiled=lambda x: x.clamp(min=EPS) ** 1.5,
        variant=True,
        aten=lambda x: torch.pow(x, 1.5),
        arithmetic=True,
    )

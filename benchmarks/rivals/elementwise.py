"""Contests of the elementwise functions."""

import torch

import safeops

from .contest import Contest, compiled, contests, library, pattern

N = 1 << 26


def fill(o):
    n, s = o.size(N), o.itemsize

    def write(x, m):
        y = x.clone()
        y[m] = 0.0
        return y

    def plain(x, m):
        return x.masked_fill(m, 0.0)

    return Contest(
        (o.normal(n),),
        (~o.mask(n),),
        ours=lambda x, m: safeops.masked_fill(x, m, 0.0),
        rivals={
            "y[m]=0": write,
            "x.masked_fill": plain,
            "compile": compiled(plain),
            "flag_gems": library("flag_gems", "masked_fill", lambda f, x, m: f(x, m, 0.0), backward=False, cuda=True),
        },
        definition=plain,
        bytes=((2 * s + 1) * n, 2 * (2 * s + 1) * n),  # read x, m, write y; read dy, m, write dx
    )


def div(o):
    n, s = o.size(N), o.itemsize
    divisor = o.normal(n, seed=1)
    divisor[divisor == 0] = 1  # at 0 the plain pattern's gradient is NaN; torch 2.11's normal bf16 numbers contain 0

    def plain(a, b):
        return torch.where(b.abs() < 1e-4, 0, a / b)

    def guarded(a, b):
        """The quotient with a correct gradient where b is 0."""
        small = b.abs() < 1e-4
        return torch.where(small, 0, a / torch.where(small, 1, b))

    return Contest(
        (o.normal(n), divisor),
        (),
        ours=lambda a, b: safeops.safe_div(a, b, eps=1e-4),
        rivals={
            "where(|b|<eps,0,a/b)": plain,
            "a/(b+eps)": pattern(lambda a, b: a / (b + 1e-4), other="moves every divisor"),
            "compile": compiled(plain),
        },
        definition=guarded,
        bytes=(3 * s * n, 8 * s * n),  # read a, b, write y; read dy, a, b, write da, db
    )


def log(o):
    n, s = o.size(N), o.itemsize

    def plain(x):
        return x.clamp(min=1e-6).log()

    return Contest(
        (o.normal(n).abs_().clamp_(min=0.01),),
        (),
        ours=lambda x: safeops.safe_log(x, eps=1e-6),
        rivals={"log(clamp)": plain, "log(x+eps)": lambda x: (x + 1e-6).log(), "compile": compiled(plain)},
        definition=plain,
        bytes=(2 * s * n, 5 * s * n),  # read x, write y; read dy, x, write dx
    )


contests(fill, {f"masked_fill/{dtype}": (dtype,) for dtype in ("bf16", "fp32", "fp16")})
contests(div, {"safe_div/bf16": ("bf16",)})
contests(log, {"safe_log/bf16": ("bf16",)})

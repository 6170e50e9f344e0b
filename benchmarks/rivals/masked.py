"""Masked reductions, and the softmax of what a mask keeps."""

import torch

import safeops

from ..reductions import _var
from .contest import Contest, compiled, contests, library

N = 1 << 26
INF = float("inf")


def mean(o):
    n, s = o.size(N), o.itemsize

    def plain(x, m):
        return (x * m).sum() / m.sum()

    return Contest(
        (o.normal(n),),
        (o.mask(n),),
        ours=lambda x, m: safeops.masked_mean(x, m),
        rivals={
            "x[m].mean()": lambda x, m: x[m].mean(),
            "(x*m).sum()/m.sum()": plain,
            "torch.masked.mean": lambda x, m: torch.masked.mean(x, mask=m),
            "compile": compiled(plain),
        },
        definition=plain,
        bytes=((s + 1) * n, 2 * (s + 1) * n),  # read x, m; read m, write dx
    )


def sum_over(o, dim):
    shape, s = o.size(8192, 8192), o.itemsize
    n = shape[0] * shape[1]

    def plain(x, m):
        return (x * m).sum(dim)

    return Contest(
        (o.normal(*shape),),
        (o.mask(*shape),),
        ours=lambda x, m: safeops.masked_sum(x, m, dim),
        rivals={
            "(x*m).sum(d)": plain,
            "torch.masked.sum": lambda x, m: torch.masked.sum(x, dim, mask=m),
            "compile": compiled(plain),
        },
        definition=plain,
        bytes=((s + 1) * n, 2 * (s + 1) * n),
    )


def var(o):
    n, s = o.size(N), o.itemsize

    def plain(x, m):
        return _var(x, m, None)

    return Contest(
        (o.normal(n),),
        (o.mask(n),),
        ours=lambda x, m: safeops.masked_var(x, m),
        rivals={"x[m].var()": lambda x, m: x[m].var(), "by where": plain, "compile": compiled(plain)},
        definition=lambda x, m: x[m].var(),
        bytes=((s + 1) * n, (3 * s + 2) * n),  # read x, m; the same, write dx
    )


def softmax(o, *shape):
    shape, s = o.size(*shape), o.itemsize
    n = shape[0] * shape[1]

    def plain(x, m):
        return x.masked_fill(~m, -INF).softmax(-1)

    return Contest(
        (o.normal(*shape),),
        (o.mask(*shape),),
        ours=lambda x, m: safeops.masked_softmax(x, m),
        rivals={
            "masked_fill.softmax": plain,
            "torch.masked.softmax": lambda x, m: torch.masked.softmax(x, -1, mask=m),
            "compile": compiled(plain),
            "masked_fill.liger": library(
                "liger_kernel.transformers",
                "LigerSoftmax",
                lambda softmax, x, m: softmax(x.masked_fill(~m, -INF)),
                options={},
                cuda=True,
            ),
        },
        definition=plain,
        bytes=((2 * s + 1) * n, (5 * s + 2) * n),  # read x, m, write y; read dy, x, m, write dx
    )


contests(mean, {f"masked_mean/{dtype}": (dtype,) for dtype in ("bf16", "fp32", "fp16")})
contests(sum_over, {"masked_sum/bf16/rows": ("bf16", -1), "masked_sum/bf16/columns": ("bf16", 0)})
contests(var, {"masked_var/bf16": ("bf16",)})
contests(
    softmax,
    {"masked_softmax/bf16/8192": ("bf16", 4096, 8192), "masked_softmax/bf16/1024": ("bf16", 16384, 1024)},
)

"""Contests of masked reductions, and of sums, means and maxima of packed sequences of 1000 rows. Contenders get the
sequences' bounds and each row's sequence id."""

import torch

import safeops

from ..reductions import _var
from .contest import Contest, compiled, contests, library, wide

N = 1 << 26


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
        bytes=((s + 1) * n, (3 * s + 2) * n),  # read x, m; read x, m, write dx
    )


contests(mean, {f"masked_mean/{dtype}": (dtype,) for dtype in ("bf16", "fp32", "fp16")})
contests(sum_over, {"masked_sum/bf16/rows": ("bf16", -1), "masked_sum/bf16/columns": ("bf16", 0)})
contests(var, {"masked_var/bf16": ("bf16",)})


LENGTH = 1000  # rows of a sequence; fewer with small operands


def segments(o, reduce, *shape):
    """Makes the contest. shape: (rows, columns), or (rows,)."""
    shape, s = o.size(*shape), o.itemsize
    shape = shape if isinstance(shape, tuple) else (shape,)
    rows, n = shape[0], torch.Size(shape).numel()
    length = min(LENGTH, rows // 4 - 1)
    cu_seqlens = torch.arange(0, rows + length, length, device=o.device).clamp(max=rows)
    ids = torch.arange(rows, device=o.device) // length
    count, bounds = len(cu_seqlens) - 1, cu_seqlens.tolist()
    ours = getattr(safeops, f"segment_{reduce}")
    of_slice = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[reduce]
    scattered = {"sum": "sum", "mean": "mean", "max": "amax"}[reduce]

    def by_slices(x, cu_seqlens, ids):
        return torch.stack([of_slice(wide(x[a:b]), 0) for a, b in zip(bounds, bounds[1:])])

    def by_segment_reduce(x, cu_seqlens, ids):
        return torch.segment_reduce(wide(x), reduce, offsets=cu_seqlens, axis=0)

    def by_scatter_reduce(x, cu_seqlens, ids):
        x = wide(x)
        index = ids.view(-1, *(1,) * (x.dim() - 1)).expand(x.shape)
        return x.new_zeros(count, *x.shape[1:]).scatter_reduce(0, index, x, scattered, include_self=False)

    def by_index_add(x, cu_seqlens, ids):
        x = wide(x)
        total = x.new_zeros(count, *x.shape[1:]).index_add(0, ids, x)
        return total if reduce == "sum" else total / cu_seqlens.diff().view(-1, *(1,) * (x.dim() - 1))

    by_ids = by_scatter_reduce if reduce == "max" else by_index_add
    return Contest(
        (o.normal(*shape),),
        (cu_seqlens, ids),
        ours=lambda x, cu_seqlens, ids: ours(x, cu_seqlens=cu_seqlens),
        rivals={
            "torch.segment_reduce": by_segment_reduce,
            "scatter_reduce": by_scatter_reduce,
            **({} if reduce == "max" else {"index_add": by_index_add}),
            "a loop of slices": by_slices,
            "compile by ids": compiled(by_ids),
            "torch_scatter": library(
                "torch_scatter", "segment_csr", lambda f, x, cu_seqlens, ids: f(wide(x), cu_seqlens, reduce=reduce)
            ),
        },
        definition=by_slices,
        # read x; write dx, for max read x again to find the maximum
        bytes=(s * n, (3 if reduce == "max" else 2) * s * n),
    )


ROWS = 131072, 512
contests(segments, {f"segment_{reduce}/bf16": ("bf16", reduce, *ROWS) for reduce in ("sum", "mean", "max")})
contests(segments, {"segment_sum/bf16/column": ("bf16", "sum", 1 << 26)})

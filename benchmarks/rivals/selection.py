"""Contests of selection by mask and by index."""

import torch
import torch.nn.functional as F

import safeops

from ..selection import _clamped
from .contest import Contest, compiled, contests, library


def compact(o):
    n, s = o.size(1 << 26), o.itemsize
    mask = o.mask(n, share=0.5)
    kept = int(mask.sum())

    def packed(x, m):
        slot = torch.where(m, m.cumsum(0) - 1, kept)
        return x.new_zeros(kept + 1).scatter(0, slot, x)[:kept]

    return Contest(
        (o.normal(n),),
        (mask,),
        ours=lambda x, m: safeops.masked_compact(x, m, capacity=kept)[0],
        rivals={
            "x[m]": lambda x, m: x[m],
            "torch.masked_select": torch.masked_select,
            "x[nonzero_static]": lambda x, m: x[torch.nonzero_static(m, size=kept).squeeze(1)],
            "compile cumsum+scatter": compiled(packed),
            "flag_gems": library("flag_gems", "masked_select", lambda f, x, m: f(x, m), backward=False, cuda=True),
        },
        definition=torch.masked_select,
        # read all of x and m, since nearly every memory sector holds a kept element; write the kept elements
        bytes=((1 + s) * n + s * kept, 2 * (1 + s) * n + 2 * s * kept),
    )


def gather(o):
    rows, width = o.size(65536, 1024)
    moved = (8 + 2 * o.itemsize) * rows * width  # read index, x, write y; read index, dy, write dx

    def guarded(x, index):
        return _clamped(torch.gather, x, 1, index, width)

    return Contest(
        (o.normal(rows, width),),
        (o.index(width, rows, width),),
        ours=lambda x, index: safeops.safe_gather(x, 1, index),
        rivals={
            "x.gather": lambda x, index: x.gather(1, index),
            "where(gather(clamp))": guarded,
            "compile": compiled(guarded),
        },
        definition=guarded,
        bytes=(moved, 2 * moved),
    )


def index_select(o):
    rows, width, taken = o.size(131072, 256, 262144)
    s = o.itemsize

    def guarded(x, index):
        return _clamped(torch.index_select, x, 0, index, rows)

    return Contest(
        (o.normal(rows, width),),
        (o.index(rows, taken),),
        ours=lambda x, index: safeops.safe_index_select(x, 0, index),
        rivals={
            "x.index_select": lambda x, index: x.index_select(0, index),
            "F.embedding": lambda x, index: F.embedding(index, x),
            "x[i]": lambda x, index: x[index],
            "compile": compiled(guarded),
        },
        definition=guarded,
        bytes=(
            8 * taken + 2 * s * taken * width,  # read index and rows; write the rows
            16 * taken + 3 * s * taken * width + s * rows * width,  # the forward's bytes, and: read index, dy; write dx
        ),
    )


contests(compact, {"masked_compact/bf16": ("bf16",)})
contests(gather, {"safe_gather/bf16": ("bf16",)})
contests(index_select, {"safe_index_select/bf16": ("bf16",)})

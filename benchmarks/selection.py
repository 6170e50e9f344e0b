"""Cases of the selection ops, compared with x[mask], torch.gather and torch.index_select. All read and write each
selected element once. All cases are variants: torch moves as many bytes, so the share of the copy's speed is judged,
and not the factor over eager."""

import torch

import safeops

from .case import KEEP, ROW, Case, case, data, keep_mask

DENSITIES = (1, 10, 50, 90, 99)  # percent kept, at random
WIDTH = 64  # elements of a row, in the cases that select rows


def compact(percent, width):
    """Registers a case of masked_compact. percent: share of rows that are kept. width: elements of a row; 1: each
    element has its own mask."""

    @case(f"masked_compact_{percent}" + ("_rows" if width > 1 else ""))
    def build(n, dtype, device):
        s, rows, share = dtype.itemsize, max(1, n // width), percent / 100
        x = data(rows * width, dtype, device, 0, shape=(rows, width) if width > 1 else (-1,))
        mask = keep_mask(rows, device, share)
        kept = int(mask.sum())
        return Case(
            (x,),
            # read the mask and the kept elements; write them and their indices
            forward_bytes=1 / width + share * (2 * s + 8 / width),
            # read the kept elements' gradients and indices; write dx
            backward_bytes=share * (s + 8 / width) + s,
            ours=lambda x: safeops.masked_compact(x, mask, capacity=kept)[0],
            eager={
                "x[m]": lambda x: x[mask],
                "x.index_select(0, m.nonzero())": lambda x: x.index_select(0, mask.nonzero().squeeze(1)),
            },
            compiled=lambda x: x[mask],  # torch.compile leaves a boolean index to eager
            variant=True,
            aten=(lambda x: x[mask]) if percent == 50 and width == 1 else None,
            counted=False,
        )


@case("masked_select")
def masked_select(n, dtype, device):
    s, x, mask = dtype.itemsize, data(n, dtype, device, 0), keep_mask(n, device)
    return Case(
        (x,),
        forward_bytes=1 + KEEP * 2 * s,  # read the mask and the kept elements; write them
        backward_bytes=1 + KEEP * s + s,  # read mask, the kept elements' gradients; write dx
        ours=lambda x: safeops.masked_select(x, mask),
        eager={"torch.masked_select(x, m)": lambda x: torch.masked_select(x, mask), "x[m]": lambda x: x[mask]},
        compiled=lambda x: torch.masked_select(x, mask),
        variant=True,
        aten=lambda x: torch.masked_select(x, mask),
        counted=False,
    )


@case("masked_scatter")
def masked_scatter(n, dtype, device):
    s, x, mask = dtype.itemsize, data(n, dtype, device, 0), keep_mask(n, device)
    source = data(int(mask.sum()), dtype, device, 1)

    def assign(x, source):
        y = x.clone()
        y[mask] = source
        return y

    return Case(
        (x, source),
        forward_bytes=1 + 2 * s + KEEP * s,  # read mask, x, source; write y
        backward_bytes=1 + 2 * s + KEEP * s,  # read mask, dy; write dx, dsource
        ours=lambda x, source: safeops.masked_scatter(x, mask, source),
        eager={"y = x.clone(); y[m] = source": assign, "torch.masked_scatter": lambda x, s: x.masked_scatter(mask, s)},
        compiled=lambda x, source: x.masked_scatter(mask, source),
        variant=True,
        aten=lambda x, source: torch.masked_scatter(x, mask, source),
    )


def _index(shape, size, device):
    return torch.randint(size, shape, device=device, generator=torch.Generator(device).manual_seed(3))


def _clamped(function, x, dim, index, size):
    """The pattern that users write for an index that may be out of bounds: clamp the index, then set the results of
    indices out of bounds to 0."""
    valid = (index >= 0) & (index < size)
    taken = function(x, dim, index.clamp(0, size - 1))
    return torch.where(valid.reshape(-1, *(1,) * (x.dim() - 1)) if index.dim() < x.dim() else valid, taken, 0)


@case("safe_gather")
def safe_gather(n, dtype, device):
    """An index (rows, ROW): each element of the result is a random element of its row."""
    s, rows, width = dtype.itemsize, max(1, n // ROW), min(ROW, n)
    x = data(rows * width, dtype, device, 0, shape=(rows, width))
    index = _index((rows, width), width, device)
    return Case(
        (x,),
        forward_bytes=8 + 2 * s,  # read index, x; write y
        backward_bytes=8 + 2 * s,  # read index, dy; write dx
        ours=lambda x: safeops.safe_gather(x, 1, index),
        eager={
            "x.gather(1, index)": lambda x: x.gather(1, index),
            "where(valid, x.gather(1, index.clamp()), 0)": lambda x: _clamped(torch.gather, x, 1, index, width),
        },
        compiled=lambda x: _clamped(torch.gather, x, 1, index, width),
        variant=True,  # torch.gather moves as many bytes, so no factor over it is expected
        aten=lambda x: torch.gather(x, 1, index),
    )


@case("safe_gather_one")
def safe_gather_one(n, dtype, device):
    """An index (rows, 1), as where a loss takes its class: most of x is never read, all of dx is written."""
    s, rows = dtype.itemsize, max(1, n // ROW)
    x = data(rows * ROW, dtype, device, 0, shape=(rows, ROW))
    index = _index((rows, 1), ROW, device)
    return Case(
        (x,),
        forward_bytes=(8 + 2 * s) / ROW,  # read index, x; write y
        backward_bytes=(8 + s) / ROW + s,  # read index, dy; write dx
        ours=lambda x: safeops.safe_gather(x, 1, index),
        eager={"x.gather(1, index)": lambda x: x.gather(1, index)},
        compiled=lambda x: _clamped(torch.gather, x, 1, index, ROW),
        variant=True,
        counted=False,
    )


def safe_index_select(suffix, dim):
    """An embedding lookup: selects as many rows (or columns) as the table has, some of them repeatedly."""

    @case("safe_index_select" + suffix)
    def build(n, dtype, device):
        s, size, width = dtype.itemsize, max(1, n // WIDTH), min(WIDTH, n)
        x = data(size * width, dtype, device, 0, shape=(size, width) if dim == 0 else (width, size))
        index = _index((size,), size, device)

        def embed(x):
            return torch.nn.functional.embedding(index, x)

        return Case(
            (x,),
            forward_bytes=8 / width + 2 * s,  # read index, x; write y
            backward_bytes=8 / width + 2 * s,  # read index, dy; write dx
            ours=lambda x: safeops.safe_index_select(x, dim, index),
            eager={
                "x.index_select(dim, index)": lambda x: x.index_select(dim, index),
                **({"F.embedding(index, x)": embed} if dim == 0 else {}),
            },
            compiled=lambda x: _clamped(torch.index_select, x, 0, index, size) if dim == 0 else x[:, index],
            variant=True,
            aten=(lambda x: torch.index_select(x, 0, index)) if dim == 0 else None,
        )


for _percent in DENSITIES:
    compact(_percent, 1)
    compact(_percent, WIDTH)
safe_index_select("", 0)
safe_index_select("_columns", 1)

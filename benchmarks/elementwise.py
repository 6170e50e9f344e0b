"""masked_fill and safe_div: each input read once, the output written once, no more."""

import torch

import safeops

from .case import Case, data, keep_mask


def masked_fill(n, dtype, device):
    s = dtype.itemsize
    fill = ~keep_mask(n, device)

    def write(x):
        y = x.clone()
        y[fill] = 0.0
        return y

    return Case(
        "masked_fill",
        (data(n, dtype, device, 0),),
        forward_bytes=2 * s + 1,  # read x, mask; write y
        backward_bytes=2 * s + 1,  # read dy, mask; write dx
        ours=lambda x: safeops.masked_fill(x, fill, 0.0),
        eager={"y = x.clone(); y[m] = 0": write, "x.masked_fill(m, 0)": lambda x: x.masked_fill(fill, 0.0)},
        compiled=lambda x: x.masked_fill(fill, 0.0),
    )


def safe_div(n, dtype, device):
    s = dtype.itemsize
    return Case(
        "safe_div",
        (data(n, dtype, device, 0), data(n, dtype, device, 1)),
        forward_bytes=3 * s,  # read a, b; write q
        backward_bytes=5 * s,  # read dq, a, b; write da, db
        ours=lambda a, b: safeops.safe_div(a, b, eps=1e-4),
        eager={
            "where(|b| < eps, 0, a / b)": lambda a, b: torch.where(b.abs() < 1e-4, 0, a / b),
            "a / (b + eps)": lambda a, b: a / (b + 1e-4),
        },
        compiled=lambda a, b: torch.where(b.abs() < 1e-4, 0, a / b),
    )


OPS = {"masked_fill": masked_fill, "safe_div": safe_div}

"""masked_sum and masked_mean: the forward reads input and mask, the backward reads the mask alone."""

import safeops

from .case import ROW, Case, data, keep_mask


def reduction(op, n, dtype, device, ours, eager, compiled, shape=(-1,), variant=False):
    s = dtype.itemsize
    x = data(n, dtype, device, 0, grad=False).view(shape).requires_grad_()
    mask = keep_mask(n, device).view(shape)
    return Case(
        op,
        (x,),
        forward_bytes=s + 1,  # read x, mask
        backward_bytes=s + 1,  # read mask; write dx
        ours=lambda x: ours(x, mask),
        eager={text: lambda x, f=f: f(x, mask) for text, f in eager.items()},
        compiled=lambda x: compiled(x, mask),
        variant=variant,
    )


def masked_sum(n, dtype, device):
    eager = {"x[m].sum()": lambda x, m: x[m].sum(), "(x * m).sum()": lambda x, m: (x * m).sum()}
    return reduction("masked_sum", n, dtype, device, safeops.masked_sum, eager, eager["(x * m).sum()"])


def masked_mean(n, dtype, device):
    eager = {
        "x[m].mean()": lambda x, m: x[m].mean(),
        "(x * m).sum() / m.sum()": lambda x, m: (x * m).sum() / m.sum(),
    }
    return reduction("masked_mean", n, dtype, device, safeops.masked_mean, eager, eager["(x * m).sum() / m.sum()"])


def masked_mean_rows(n, dtype, device):
    def pattern(x, m):
        return (x * m).sum(-1) / m.sum(-1)

    def ours(x, m):
        return safeops.masked_mean(x, m, dim=-1)

    eager = {"(x * m).sum(-1) / m.sum(-1)": pattern}
    return reduction("masked_mean_rows", n, dtype, device, ours, eager, pattern, shape=(-1, ROW), variant=True)


OPS = {"masked_sum": masked_sum, "masked_mean": masked_mean, "masked_mean_rows": masked_mean_rows}

"""The statistics: the forward reads input and mask once, the backward reads them again and writes the gradient."""

import torch

import safeops

from .case import ROW, Case, data, keep_mask

INF = float("inf")


def _sum(x, m, dim):
    return x.sum() if dim is None else x.sum(dim)


def _squares(x, m, dim):
    return _sum(torch.where(m, x, 0).square(), m, dim)


def _var(x, m, dim):
    """Two passes, as torch.masked.var: without a boolean index there is no shorter one."""
    n = m.sum(dim, keepdim=True)
    mean = torch.where(m, x, 0).sum(dim, keepdim=True) / n
    return torch.where(m, x - mean, 0).square().sum(dim) / (n.squeeze(dim) - 1)


def _over(dim):
    """The dims that torch's own functions take for all of them."""
    return tuple(range(1)) if dim is None else dim


# op -> (what users write on the whole tensor, with a boolean index), (the same without one, for rows and torch.compile)
PATTERNS = {
    "masked_var": (
        {"x[m].var()": lambda x, m: x[m].var()},
        "var by torch.where", lambda x, m, dim: _var(x, m, _over(dim)),
    ),
    "masked_std": (
        {"x[m].std()": lambda x, m: x[m].std()},
        "var by torch.where, sqrt()", lambda x, m, dim: _var(x, m, _over(dim)).sqrt(),
    ),
    "masked_amax": (
        {"x[m].amax()": lambda x, m: x[m].amax()},
        "x.masked_fill(~m, -inf).amax()", lambda x, m, dim: x.masked_fill(~m, -INF).amax(_over(dim)),
    ),
    "masked_amin": (
        {"x[m].amin()": lambda x, m: x[m].amin()},
        "x.masked_fill(~m, inf).amin()", lambda x, m, dim: x.masked_fill(~m, INF).amin(_over(dim)),
    ),
    "masked_norm": (
        {"x[m].norm()": lambda x, m: x[m].norm()},
        "torch.where(m, x, 0).norm()", lambda x, m, dim: torch.where(m, x, 0).norm(dim=dim),
    ),
    "masked_sum_of_squares": (
        {"x[m].square().sum()": lambda x, m: x[m].square().sum()},
        "torch.where(m, x, 0).square().sum()", _squares,
    ),
    "masked_rms": (
        {"x[m].square().mean().sqrt()": lambda x, m: x[m].square().mean().sqrt()},
        "(squares.sum() / m.sum()).sqrt()", lambda x, m, dim: (_squares(x, m, dim) / _sum(m, m, dim)).sqrt(),
    ),
    "masked_logsumexp": (
        {"x[m].logsumexp(0)": lambda x, m: x[m].logsumexp(0)},
        "x.masked_fill(~m, -inf).logsumexp()", lambda x, m, dim: x.masked_fill(~m, -INF).logsumexp(_over(dim)),
    ),
}  # fmt: skip


def _case(op, rows):
    ours = getattr(safeops, op)
    indexed, text, plain = PATTERNS[op]

    def build(n, dtype, device):
        s = dtype.itemsize
        dim = -1 if rows else None
        shape = (-1, ROW) if rows else (-1,)
        x = data(n, dtype, device, 0, grad=False).view(shape).requires_grad_()
        mask = keep_mask(n, device).view(shape)
        eager = {} if rows else {name: lambda x, f=f: f(x, mask) for name, f in indexed.items()}
        eager[text] = lambda x: plain(x, mask, dim)
        return Case(
            op + ("_rows" if rows else ""),
            (x,),
            forward_bytes=s + 1,  # read x, mask
            backward_bytes=2 * s + 1,  # read x, mask; write dx
            ours=(lambda x: ours(x, mask, dim)) if rows else (lambda x: ours(x, mask)),
            eager=eager,
            compiled=lambda x: plain(x, mask, dim),
            variant=rows,
            bare=(lambda x: x.logsumexp(_over(dim))) if op == "masked_logsumexp" else None,
        )

    return build


OPS = {op + ("_rows" if rows else ""): _case(op, rows) for rows in (False, True) for op in PATTERNS}

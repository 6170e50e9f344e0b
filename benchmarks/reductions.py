"""Cases of the reductions. The forward reads input and mask once. The backward of sum and mean reads the mask alone;
the backward of the other reductions reads input and mask again. All write the gradient."""

import torch

import safeops

from .case import ROW, Case, case, data, keep_mask

INF = float("inf")


def _sum(x, dim):
    return x.sum() if dim is None else x.sum(dim)


def _over(dim):
    """Replaces dim None by (0,), which torch's own functions take. Tensors that are reduced with None have one dim."""
    return tuple(range(1)) if dim is None else dim


def _squares(x, m, dim):
    return _sum(torch.where(m, x, 0).square(), dim)


def _var(x, m, dim):
    """The variance in two passes, as torch.masked.var computes it. No pattern without a boolean index is shorter."""
    dim = _over(dim)
    n = m.sum(dim, keepdim=True)
    mean = torch.where(m, x, 0).sum(dim, keepdim=True) / n
    return torch.where(m, x - mean, 0).square().sum(dim) / (n.squeeze(dim) - 1)


def reduction(name, indexed, plain, aten, *, reads_input=True, arithmetic=False):
    """Registers two cases: over the whole tensor, and over rows (`name`_rows).

    indexed: {text: function of (x, m)}, patterns on the whole tensor that have a boolean index. plain: (text, function
    of (x, m, dim)), the pattern without a boolean index, for rows and torch.compile.
    """
    text, pattern = plain

    def builder(rows):
        dim = -1 if rows else None

        def build(n, dtype, device):
            s = dtype.itemsize
            shape = (-1, min(ROW, n)) if rows else (-1,)
            ours = getattr(safeops, name)
            mask = keep_mask(n, device).view(shape)
            eager = {} if rows else {name: lambda x, f=f: f(x, mask) for name, f in indexed.items()}
            eager[text] = lambda x: pattern(x, mask, dim)
            return Case(
                (data(n, dtype, device, 0, shape=shape),),
                forward_bytes=s + 1,  # read x, mask
                backward_bytes=s + 1 + (s if reads_input else 0),  # read mask, and x; write dx
                ours=(lambda x: ours(x, mask, dim)) if rows else (lambda x: ours(x, mask)),
                eager=eager,
                compiled=eager[text],
                variant=rows,
                aten=aten if arithmetic or not rows else None,
                arithmetic=arithmetic,
            )

        return build

    case(name)(builder(False))
    case(f"{name}_rows")(builder(True))


reduction(
    "masked_sum",
    {"x[m].sum()": lambda x, m: x[m].sum()},
    ("(x * m).sum()", lambda x, m, dim: _sum(x * m, dim)),
    torch.sum,
    reads_input=False,
)
reduction(
    "masked_mean",
    {"x[m].mean()": lambda x, m: x[m].mean()},
    ("(x * m).sum() / m.sum()", lambda x, m, dim: _sum(x * m, dim) / _sum(m, dim)),
    torch.mean,
    reads_input=False,
)
reduction("masked_var", {"x[m].var()": lambda x, m: x[m].var()}, ("var by torch.where", _var), torch.var)
reduction(
    "masked_std",
    {"x[m].std()": lambda x, m: x[m].std()},
    ("var by torch.where, sqrt()", lambda x, m, dim: _var(x, m, dim).sqrt()),
    torch.std,
)
reduction(
    "masked_amax",
    {"x[m].amax()": lambda x, m: x[m].amax()},
    ("x.masked_fill(~m, -inf).amax()", lambda x, m, dim: x.masked_fill(~m, -INF).amax(_over(dim))),
    torch.amax,
)
reduction(
    "masked_amin",
    {"x[m].amin()": lambda x, m: x[m].amin()},
    ("x.masked_fill(~m, inf).amin()", lambda x, m, dim: x.masked_fill(~m, INF).amin(_over(dim))),
    torch.amin,
)
reduction(
    "masked_norm",
    {"x[m].norm()": lambda x, m: x[m].norm()},
    ("torch.where(m, x, 0).norm()", lambda x, m, dim: torch.where(m, x, 0).norm(dim=dim)),
    torch.linalg.vector_norm,
)
reduction(
    "masked_sum_of_squares",
    {"x[m].square().sum()": lambda x, m: x[m].square().sum()},
    ("torch.where(m, x, 0).square().sum()", _squares),
    torch.sum,
)
reduction(
    "masked_rms",
    {"x[m].square().mean().sqrt()": lambda x, m: x[m].square().mean().sqrt()},
    ("(squares.sum() / m.sum()).sqrt()", lambda x, m, dim: (_squares(x, m, dim) / _sum(m, dim)).sqrt()),
    torch.linalg.vector_norm,
)
reduction(
    "masked_logsumexp",
    {"x[m].logsumexp(0)": lambda x, m: x[m].logsumexp(0)},
    ("x.masked_fill(~m, -inf).logsumexp()", lambda x, m, dim: x.masked_fill(~m, -INF).logsumexp(_over(dim))),
    lambda x: x.logsumexp(-1),
    arithmetic=True,
)


@case("masked_count")
def masked_count(n, dtype, device):
    x, mask = data(n, dtype, device, 0, grad=False), keep_mask(n, device)
    return Case(
        (x,),
        forward_bytes=1,  # read mask
        backward_bytes=None,
        ours=lambda x: safeops.masked_count(x, mask),
        eager={"m.sum()": lambda x: mask.sum()},
        compiled=lambda x: mask.sum(),
        variant=True,  # torch's pattern moves equal bytes
        aten=lambda x: torch.count_nonzero(mask),
        counted=False,
    )


@case("safe_norm")
def safe_norm(n, dtype, device):
    s = dtype.itemsize
    return Case(
        (data(n, dtype, device, 0),),
        forward_bytes=s,  # read x
        backward_bytes=2 * s,  # read x; write dx
        ours=lambda x: safeops.safe_norm(x),
        eager={"x.norm()": lambda x: x.norm(), "x.square().sum().sqrt()": lambda x: x.square().sum().sqrt()},
        compiled=lambda x: x.norm(),
        variant=True,  # torch's pattern moves equal bytes
        aten=torch.linalg.vector_norm,
    )


# ---- packed sequences of 1000 rows each


def segments(name, reduce, loop, *, reads_input=False):
    """Registers two cases: rows of 512 columns, and of one column (`name`_rows). Users write torch.segment_reduce,
    index_add or a loop over slices."""

    def builder(columns):
        def build(n, dtype, device):
            s, wide = dtype.itemsize, min(columns, n)
            x = data(n // wide * wide, dtype, device, 0, shape=(-1, wide) if columns > 1 else (-1,))
            rows = x.shape[0]
            cu_seqlens = torch.arange(0, rows + 1000, 1000, device=device).clamp(max=rows)
            ids = torch.arange(rows, device=device) // 1000
            count, bounds, ours = len(cu_seqlens) - 1, cu_seqlens.tolist(), getattr(safeops, name)

            def by_segment_reduce(x):
                return torch.segment_reduce(x.float(), reduce, offsets=cu_seqlens, axis=0)

            def by_slices(x):
                return torch.stack([loop(x[a:b].float(), 0) for a, b in zip(bounds, bounds[1:])])

            def by_index(x):
                zeros = torch.zeros(count, *x.shape[1:], device=device)
                if reduce == "max":
                    index = ids.view(-1, *(1,) * (x.dim() - 1)).expand(x.shape)
                    return zeros.scatter_reduce(0, index, x.float(), "amax", include_self=False)
                total = zeros.index_add(0, ids, x.float())
                sizes = cu_seqlens.diff().view(-1, *(1,) * (x.dim() - 1))
                return total if reduce == "sum" else total / sizes

            return Case(
                (x,),
                forward_bytes=s,  # read x
                backward_bytes=2 * s if reads_input else s,  # read x, to find the maximum; write dx
                ours=lambda x: ours(x, cu_seqlens=cu_seqlens),
                eager={
                    f'segment_reduce(x, "{reduce}")': by_segment_reduce,
                    "by ids": by_index,
                    "a loop of slices": by_slices,
                },
                compiled=by_index,
                variant=columns == 1,
            )

        return build

    case(name)(builder(512))
    case(f"{name}_rows")(builder(1))


segments("segment_sum", "sum", torch.sum)
segments("segment_mean", "mean", torch.mean)
segments("segment_max", "max", torch.amax, reads_input=True)

"""Cases of reductions over a sharded dim, and of vectors along a sharded dim, each compared with plain tensors."""

import functools

import torch
from torch.distributed.tensor.debug import CommDebugMode

import safeops
from tests.distributed.sharded import S0, S1, P, R, close, compare, distributed, mesh, sending

INF, NAN = float("inf"), float("nan")
STATISTICS = [
    ("masked_var", {}),
    ("masked_var", {"correction": 0}),
    ("masked_std", {}),
    ("masked_amax", {}),
    ("masked_amin", {}),
    ("masked_norm", {}),
    ("masked_norm", {"ord": 1}),
    ("masked_norm", {"ord": INF}),
    ("masked_norm", {"ord": -INF}),
    ("masked_rms", {}),
    ("masked_sum_of_squares", {}),
    ("masked_logsumexp", {}),
    ("masked_count", {}),
    ("masked_mean", {}),
    ("masked_sum", {}),
]
VECTORS = "masked_softmax", "masked_log_softmax", "normalize", "cosine_similarity"
CUT = [S0], [S0, S1]  # placements that shard dim 0, for a mesh of one dim and of two
OLD = torch.__version__ < "2.12"  # its DTensors lack frexp, which definitions of quotients use


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def kept(*shape, share=0.6):
    """Returns a mask that keeps none of the first rows, so that one rank keeps nothing."""
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < share
    keep[: max(1, shape[0] // 4)] = False
    return keep


def plain(name, x, placements=(S0,), kind=torch.float64, **options):
    """Calls compare() with input, mask and weight in one layout."""
    tensors = {"input": x, **{k: options.pop(k) for k in ("mask", "weight") if k in options}}
    return compare(name, tensors, dict.fromkeys(tensors, placements), kind, **options)


def statistics(dtype):
    for name, options in STATISTICS:
        for shape in ((7, 3), (1, 3)):  # uneven shards, then empty ones
            x, mask, weight = normal(*shape, dtype=dtype), kept(*shape), normal(*shape, dtype=dtype, seed=2).abs()
            weight[-1, 0] = 0
            for more in ({}, {"mask": mask}, {"mask": mask, "weight": weight}):
                got = plain(name, x, kind=dtype, dim=0, **more, **options)
                assert got.placements == (R,)
        if dtype != torch.float64:
            continue
        for dim in (None, 0, (0, 1)):
            plain(name, normal(5, 4, dtype=dtype), CUT[1], dtype, dim=dim, keepdim=True, **options)
        for placements in ([P], [S1]):
            plain(name, normal(5, 4, dtype=dtype), placements, dtype, dim=1, **options)
    for empty in ("zero", "nan"):
        nothing = torch.zeros(5, 3, dtype=torch.bool)
        for name in ("masked_var", "masked_amax", "masked_logsumexp"):
            plain(name, normal(5, 3, dtype=dtype), kind=dtype, mask=nothing, empty=empty)
            plain(name, normal(5, 3, dtype=dtype), kind=dtype, mask=nothing.index_fill(0, torch.tensor(0), True))
    safe = functools.partial(compare, "safe_norm", placements={"input": [S0]}, kind=dtype)
    for ord in (1, 2, INF):
        safe({"input": normal(5, 3, dtype=dtype)}, dim=0, ord=ord)
        safe({"input": torch.zeros(5, 3, dtype=dtype)}, dim=0, ord=ord)


def ties():
    """Equal extremes on several ranks must share the gradient."""
    x = torch.tensor([3.0, 1.0, 3.0, -3.0, 3.0, 0.0], dtype=torch.float64)
    for name, options in (("masked_amax", {}), ("masked_amin", {}), ("masked_norm", {"ord": INF})):
        plain(name, x, **options)
        plain(name, torch.full_like(x, 2), mask=torch.arange(6) != 1, **options)
    sharded = distributed(x, [S0])
    (d,) = torch.autograd.grad(safeops.masked_amax(sharded), sharded)
    assert d.full_tensor().tolist() == [1 / 3, 0, 1 / 3, 0, 1 / 3, 0]


def extremes():
    """Results are right where squares overflow or vanish, where the mean is large beside the deviation, and where the
    deviation is exactly 0."""
    for dtype, large, small in (
        (torch.float64, 1e200, 1e-200),
        (torch.float32, 1e30, 1e-30),
        (torch.float16, 3e4, 1e-4),
    ):
        for size in (large, small):
            x = (normal(7, 3).clamp(-1.5, 1.5) * size).to(dtype)
            for name in ("masked_norm", "masked_rms", "masked_std"):
                plain(name, x, kind=torch.float64 if dtype == torch.float64 else torch.float32, dim=0)
    for name in ("masked_var", "masked_std"):
        plain(name, normal(64, 2) + 1e7, kind=torch.float32, dim=0)
        plain(name, torch.full((7, 2), 0.1, dtype=torch.float64), dim=0)
    plain("masked_logsumexp", normal(7, 3) + 1e4, dim=0)
    most = torch.full((4,), torch.finfo(torch.float32).max)
    compare("safe_norm", {"input": most}, {"input": [S0]})


def special():
    """NaN or inf on any rank must show as in one process; exp(-inf) must add nothing."""
    for value in (NAN, INF, -INF):
        for at in (slice(0, 1), slice(6, 7), slice(4, 7), slice(0, 7)):
            x = normal(7, 3)
            x[at, 1] = value
            for name, options in STATISTICS:
                plain(name, x, dim=0, **options)
            for name in VECTORS[:3]:
                plain(name, x, dim=0)
            two = {"x1": x, "x2": normal(7, 3, seed=3)}
            compare("cosine_similarity", two, dict.fromkeys(two, [S0]), torch.float64, dim=0)
    x = normal(7, 3).masked_fill(~kept(7, 3), NAN)
    for name, options in STATISTICS:
        plain(name, x, mask=kept(7, 3), dim=0, **options)


def vectors(dtype):
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    for name in VECTORS:
        for shape in ((7, 3), (1, 3), (8, 4)):
            layouts = (0, [S0]), (1, [S0, S1]), (-1, [S1]), (0, [S0, S1]), (1, [S0]), (0, [P]), (0, [R])
            for dim, placements in layouts if dtype == torch.float64 else layouts[:2]:
                x = normal(*shape, dtype=dtype)
                if name == "cosine_similarity":
                    two = {"x1": x, "x2": normal(*shape, dtype=dtype, seed=3)}
                    compare(name, two, dict.fromkeys(two, placements), kind, dim=dim, size=1)
                    continue
                got = plain(name, x, placements, kind, dim=dim, size=1)
                assert P in placements or got.placements == tuple(placements)
                if "softmax" in name:
                    keep = kept(*shape)
                    keep[:, 0] = False
                    where = {"input": placements, "mask": [R if p is P else p for p in placements]}
                    compare(name, {"input": x, "mask": keep}, where, kind, dim=dim)


def short_vectors():
    """Results are right for vectors that are 0, are 0 on one rank, are shorter than eps, or have squares that
    overflow."""
    for dtype in (torch.float64, torch.float32):
        x, y = normal(6, 5, dtype=dtype), normal(6, 5, dtype=dtype, seed=3)
        x[:, 0] = 0
        x[:3, 1] = 0
        x[3:, 2] = 0
        x[:, 3] *= torch.finfo(dtype).tiny / 4
        x[:, 4] *= torch.finfo(dtype).max / 8
        for eps in (None, 0, 0.5, 10.0):
            plain("normalize", x, kind=dtype, dim=0, eps=eps)
            for two in ({"x1": x, "x2": y}, {"x1": y, "x2": x}):
                compare("cosine_similarity", two, dict.fromkeys(two, [S0]), dtype, dim=0, eps=eps)
    for row in (y[:1], y[0]):  # y broadcasts to x
        two = {"x1": normal(6, 5), "x2": row.double()}
        for placements in ([S1], [S0]):
            compare("cosine_similarity", two, {"x1": placements, "x2": [R]}, torch.float64, dim=1)


def halves():
    """Half results must be rounded once, after the parts of all ranks are added."""
    x, y = normal(7, 3, dtype=torch.float16), normal(7, 3, dtype=torch.float16, seed=3)
    for name in VECTORS:
        leaves = [x, y] if name == "cosine_similarity" else [x]
        wide, shared = [t.double().requires_grad_() for t in leaves], [distributed(t, [S0]) for t in leaves]
        want, got = (getattr(safeops, name)(*operands, dim=0) for operands in (wide, shared))
        wants, gots = torch.autograd.grad(want.sum(), wide), torch.autograd.grad((got * 1).sum(), shared)
        for w, g in zip((want, *wants), (got, *gots)):
            assert g.dtype == (torch.float32 if g is got and len(leaves) == 2 else torch.float16)
            g = g.full_tensor().double()
            assert ((g - w).abs() <= 1.01 * 2**-11 * w.abs() + 3e-7).all(), (name, g - w)
    sign = 1 - 2 * (torch.arange(mesh().size()) % 2)[:, None]  # one row per rank, with gradients that nearly cancel
    row, many = x[:1], ((y[:1] + 0.1 * normal(len(sign), 3)) * sign).half()
    wide, shared = row.double().requires_grad_(), distributed(row, [R])
    (want,) = torch.autograd.grad(safeops.cosine_similarity(wide, many.double()).sum(), wide)
    got = safeops.cosine_similarity(shared, distributed(many, [S0], grad=False)).sum()
    (got,) = torch.autograd.grad(got, shared)
    assert ((got.full_tensor() - want).abs() <= 1.01 * 2**-11 * want.abs() + 3e-7).all()


def second_order():
    x, y = normal(5, 3), normal(5, 3, seed=3)
    functions = [
        lambda a, b: (safeops.masked_var(a, dim=0) * b[0]).sum(),
        lambda a, b: (safeops.masked_logsumexp(a, dim=0) * b[0]).sum(),
        lambda a, b: (safeops.masked_softmax(a, dim=0) * b).sum(),
        lambda a, b: (safeops.masked_log_softmax(a, dim=0) * b).sum(),
        lambda a, b: (safeops.normalize(a, dim=0) * b).sum(),
        lambda a, b: safeops.cosine_similarity(a, b, dim=0).sum(),
    ]
    for f in functions[: 4 if OLD else None]:
        results = []
        for leaves in (
            [t.clone().requires_grad_() for t in (x, y)],
            *([distributed(t, [how]) for t in (x, y)] for how in (S0, P)),
        ):
            first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
            results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
        for want, *gots in zip(*results):
            for got in gots:
                close(got, want, 1e-12)


def wire():
    """Forward must send partial results once, backward inner products at most once, and neither the input."""
    x, y, keep, weight = (distributed(t, [S0]) for t in (normal(6, 5), normal(6, 5), kept(6, 5), normal(6, 5).abs()))
    weight.requires_grad_(False)
    results = 5 * 8  # bytes of one number per result
    for columns, backward, call in (
        (3, 0, lambda: safeops.masked_var(x, dim=0)),
        (4, 0, lambda: safeops.masked_var(x, keep, dim=0, weight=weight)),
        (3, 0, lambda: safeops.masked_amax(x, keep, dim=0)),
        (2, 0, lambda: safeops.masked_norm(x, dim=0)),
        (2, 0, lambda: safeops.masked_norm(x, dim=0, ord=1)),
        (2, 0, lambda: safeops.masked_rms(x, keep, dim=0)),
        (2, 0, lambda: safeops.masked_sum_of_squares(x, dim=0)),
        (3, 0, lambda: safeops.masked_logsumexp(x, keep, dim=0)),
        (1, None, lambda: safeops.masked_count(x, keep, dim=0)),
        (1, None, lambda: safeops.masked_count(keep, dim=0)),
        (3, 1, lambda: safeops.masked_softmax(x, keep, dim=0)),
        (3, 1, lambda: safeops.masked_log_softmax(x, keep, dim=0)),
        (2, 1, lambda: safeops.normalize(x, dim=0)),
        (3, 0, lambda: safeops.cosine_similarity(x, y, dim=0)),
        (0, 0, lambda: safeops.masked_softmax(x, dim=1)),
        (0, 0, lambda: safeops.masked_var(x, dim=1)),
    ):
        with sending() as sent, CommDebugMode() as all_of_them:
            out = call()
        assert sent == [columns * results] * bool(columns), (sent, columns)
        assert all_of_them.get_total_counts() <= 1
        if backward is not None:
            with sending() as sent, CommDebugMode() as all_of_them:
                torch.autograd.grad(out, x, torch.ones_like(out))
            assert sent == [results] * backward and all_of_them.get_total_counts() <= backward, (sent, backward)


CASES = {
    "statistics fp64": functools.partial(statistics, torch.float64),
    "statistics fp32": functools.partial(statistics, torch.float32),
    "ties": ties,
    "extremes": extremes,
    "special": special,
    "vectors fp64": functools.partial(vectors, torch.float64),
    "vectors fp32": functools.partial(vectors, torch.float32),
    "short vectors": short_vectors,
    "halves": halves,
    "second order": second_order,
    "wire": wire,
}

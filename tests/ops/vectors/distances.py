"""cosine_embedding_loss and triplet_margin_loss."""

import torch
import torch.nn.functional as F

from safeops.core.op import registry
from safeops.testing import Bad
from tests.ops import gpu
from tests.ops.bad_calls import NAN
from tests.ops.operands import plain
from tests.ops.row_loss import bad_calls, row_loss, vectors

# ---- cosine_embedding_loss


def _cosine_embedding(x, y, target, margin=0.0):
    norms = x.norm(dim=-1) * y.norm(dim=-1)
    alive = norms != 0
    cos = torch.where(alive, (x * y).sum(-1) / torch.where(alive, norms, 1), 0)
    apart = torch.where(cos - margin <= 0, 0, cos - margin)
    return torch.where(target == 1, 1 - cos, torch.where(target == -1, apart, 0))


def _cosine_sizes(x, y, target, margin=0.0):
    """Sizes of the terms. A cosine is the product of unit vectors u1, u2; its slope to x1 is (u2 - cos u1) / |x1|."""

    def slope(x):
        norm = x.norm(dim=-1, keepdim=True)
        return 2 / torch.where(norm == 0, 1, norm)

    return x.new_full(x.shape[:-1], 2.0 + abs(margin)), (slope(x), slope(y))


SIGNS = torch.tensor([1, -1, -1, 1, -1])

# ---- triplet_margin_loss


def _distance(x, y, p, eps):
    d = x - y
    same = (d == 0).all(-1, keepdim=True)
    d = torch.where(same, 1, d + eps).abs()
    if p == float("inf"):
        return torch.where(same[..., 0], 0, d.amax(-1))
    return torch.where(same[..., 0], 0, (d**p).sum(-1) ** (1 / p))


def _triplet(a, b, c, margin=1.0, p=2.0, eps=1e-6, swap=False):
    near, far = _distance(a, b, p, eps), _distance(a, c, p, eps)
    if swap:
        far = torch.minimum(far, _distance(b, c, p, eps))
    d = near - far + margin
    return torch.where(d <= 0, 0, d)


def _triplet_sizes(a, b, c, margin=1.0, p=2.0, eps=1e-6, swap=False):
    """Sizes of the terms. A distance has slopes of at most 1, and a vector is part of at most two distances."""
    size = sum(_distance(x, y, p, eps) for x, y in ((a, b), (a, c), (b, c))) + margin
    return size, (2.0, 2.0, 2.0)


row_loss(
    "cosine_embedding_loss",
    _cosine_embedding,
    _cosine_sizes,
    F.cosine_embedding_loss,
    vectors(2, SIGNS[:, None]),
    {"input1": plain(), "input2": plain(1), "target": SIGNS},
    {"margin": 0.25},
    [
        *bad_calls("cosine_embedding_loss", ("input1", "input2"), (SIGNS[:2],), {"margin": []}),
        Bad((torch.ones(2, 5), torch.ones(2, 5), 1.0), {}, TypeError, ("cosine_embedding_loss", "target", "float")),
        Bad((torch.ones(2, 5), torch.ones(2, 5), torch.ones(3)), {}, ValueError,
            ("cosine_embedding_loss", "target", "(3,)", "rows (2,)")),
        Bad((torch.ones(2, 5), torch.ones(2, 5), torch.ones(2, 5)), {}, ValueError,
            ("cosine_embedding_loss", "target", "(2, 5)", "rows (2,)")),
        Bad((torch.ones(2, 5), torch.ones(2, 5), SIGNS[:2].to("meta")), {}, ValueError,
            ("cosine_embedding_loss", "target", "meta")),
    ],
)  # fmt: skip


def _triplet_case(n, dtype, seed):
    """Returns a GPU call of the kernel alone: rows of about a thousand numbers, or one row."""
    length = next((k for k in (1000, 1024, 8) if n % k == 0), n)
    x, y, z = (gpu.numbers(n, dtype, seed + i) for i in range(3))
    op = registry["triplet_margin_loss"]
    rows = lambda *xs: op.call(*(x.view(-1, length) for x in xs), None, 0.75, 2.0, 1e-6, True)  # noqa: E731
    return gpu.Case(rows, (x, y, z))


row_loss(
    "triplet_margin_loss",
    _triplet,
    _triplet_sizes,
    F.triplet_margin_loss,
    vectors(3),
    {"anchor": plain(), "positive": plain(1), "negative": plain(3)},
    {"margin": 1.5, "p": 2.0, "eps": 1e-6, "swap": True},
    bad_calls(
        "triplet_margin_loss",
        ("anchor", "positive", "negative"),
        (),
        {"margin": [0.0, -1.0, NAN], "p": [0.0, -1.0, NAN], "eps": [-1.0, NAN]},
        ("swap",),
    ),
    gpu=_triplet_case,
)

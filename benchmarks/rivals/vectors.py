"""Contests of functions of vectors of 1,024 elements, and of info_nce_loss, in which matrix products take most of the
time."""

import torch
import torch.nn.functional as F

import safeops

from .contest import Contest, compiled, contests

SHAPE = 65536, 1024


def of_rows(operands, ours, plain, name, forward, backward):
    """Returns a function that makes the contest of a function of several tensors of one shape. forward, backward: how
    many such tensors each direction reads and writes."""

    def build(o):
        shape = o.size(*SHAPE)
        moved = shape[0] * shape[1] * o.itemsize
        return Contest(
            tuple(o.normal(*shape, seed=seed) for seed in range(operands)),
            (),
            ours=ours,
            rivals={name: plain, "compile": compiled(plain)},
            definition=plain,
            bytes=(forward * moved, (forward + backward) * moved),
        )

    return build


def cosine(a, b):
    return F.cosine_similarity(a, b, dim=-1)


def normalize(x):
    return F.normalize(x, dim=-1)


def triplet(a, p, n):
    return F.triplet_margin_loss(a, p, n)


def info_nce(o):
    rows, width = o.size(8192, 256)

    def plain(q, k):
        logits = normalize(q) @ normalize(k).T / 0.1
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide), torch.arange(q.shape[0], device=q.device))

    return Contest(
        (o.normal(rows, width), o.normal(rows, width, seed=1)),
        (),
        ours=lambda q, k: safeops.info_nce_loss(q, k),
        rivals={"ce(normalize@normalize.T)": plain, "compile": compiled(plain)},
        definition=plain,
        flops=(2 * rows * rows * width, 6 * rows * rows * width),
    )


contests(
    of_rows(2, lambda a, b: safeops.cosine_similarity(a, b, dim=-1), cosine, "F.cosine_similarity", 2, 4),
    {"cosine_similarity/bf16": ("bf16",)},
)
contests(
    of_rows(1, lambda x: safeops.normalize(x, dim=-1), normalize, "F.normalize", 2, 3), {"normalize/bf16": ("bf16",)}
)
contests(
    of_rows(3, lambda a, p, n: safeops.triplet_margin_loss(a, p, n), triplet, "F.triplet_margin_loss", 3, 6),
    {"triplet_margin_loss/bf16": ("bf16",)},
)
contests(info_nce, {"info_nce_loss/bf16": ("bf16",)})

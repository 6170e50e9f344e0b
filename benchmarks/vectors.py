"""Cases of functions and losses of vectors: rows of several lengths, and image channels."""

import torch
import torch.nn.functional as F

import safeops
from safeops.core.domain import box

from .case import Case, case, keep_mask
from .shapes import SHAPES, tensor


def normalize(suffix):
    @case("normalize" + suffix)
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        return Case(
            (tensor(n, dtype, device, 0, shape),),
            forward_bytes=2 * s,  # read x; write y
            backward_bytes=3 * s,  # read dy, x; write dx
            ours=lambda x: safeops.normalize(x, dim=dim),
            eager={"F.normalize(x)": lambda x: F.normalize(x, dim=dim)},
            compiled=lambda x: F.normalize(x, dim=dim),
            variant=bool(suffix),
            aten=lambda x: torch.softmax(x, dim),  # in place of normalize, which is no single op in torch
        )


def cosine_similarity(suffix):
    @case("cosine_similarity" + suffix)
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        return Case(
            (tensor(n, dtype, device, 0, shape), tensor(n, dtype, device, 1, shape)),
            forward_bytes=2 * s,  # read x1, x2
            backward_bytes=4 * s,  # read x1, x2; write dx1, dx2
            ours=lambda a, b: safeops.cosine_similarity(a, b, dim),
            eager={"F.cosine_similarity(a, b)": lambda a, b: F.cosine_similarity(a, b, dim=dim)},
            compiled=lambda a, b: F.cosine_similarity(a, b, dim=dim),
            variant=bool(suffix),
            aten=lambda a, b: torch.cosine_similarity(a, b, dim),
        )


@case("cosine_embedding_loss")
def cosine_embedding_loss(n, dtype, device):
    """The loss is computed from cosine_similarity, so it moves that function's bytes."""
    shape, s = SHAPES[""](n)[0], dtype.itemsize
    signs = keep_mask(shape[0], device) * 2 - 1
    return Case(
        (tensor(n, dtype, device, 0, shape), tensor(n, dtype, device, 1, shape)),
        forward_bytes=2 * s,  # read x1, x2
        backward_bytes=4 * s,  # read x1, x2; write dx1, dx2
        ours=lambda a, b: safeops.cosine_embedding_loss(a, b, signs, margin=0.2),
        eager={"F.cosine_embedding_loss(a, b, y)": lambda a, b: F.cosine_embedding_loss(a, b, signs, margin=0.2)},
        compiled=lambda a, b: F.cosine_embedding_loss(a, b, signs, margin=0.2),
        variant=True,
    )


@case("triplet_margin_loss")
def triplet_margin_loss(n, dtype, device):
    shape, s = SHAPES[""](n)[0], dtype.itemsize
    return Case(
        tuple(tensor(n, dtype, device, seed, shape) for seed in range(3)),
        forward_bytes=3 * s,  # read a, b, c
        backward_bytes=6 * s,  # read a, b, c; write da, db, dc
        ours=lambda a, b, c: safeops.triplet_margin_loss(a, b, c),
        eager={"F.triplet_margin_loss(a, b, c)": F.triplet_margin_loss},
        compiled=F.triplet_margin_loss,
        variant=True,
    )


@case("box_iou_loss")
def box_iou_loss(n, dtype, device):
    """n is the number of coordinates: a box has four."""
    n, s = n - n % 4, dtype.itemsize
    boxes = [box(tensor(n, dtype, device, seed, (n // 4, 4)).detach()).requires_grad_() for seed in range(2)]

    def usual(a, b):
        """Computes the loss by the formula of torchvision's generalized_box_iou_loss."""
        a, b = a.float(), b.float()
        (a1, a2), (b1, b2) = a.split(2, -1), b.split(2, -1)
        both = (torch.minimum(a2, b2) - torch.maximum(a1, b1)).clamp(min=0).prod(-1)
        union = (a2 - a1).prod(-1) + (b2 - b1).prod(-1) - both
        hull = (torch.maximum(a2, b2) - torch.minimum(a1, b1)).prod(-1)
        return (1 - both / (union + 1e-7) + (hull - union) / (hull + 1e-7)).mean()

    return Case(
        tuple(boxes),
        forward_bytes=2 * s,  # read a, b
        backward_bytes=4 * s,  # read a, b; write da, db
        ours=lambda a, b: safeops.box_iou_loss(a, b, kind="giou"),
        eager={"torchvision's formula": usual},
        compiled=usual,
        variant=True,
        counted=False,
    )


@case("info_nce_loss")
def info_nce_loss(n, dtype, device):
    """n logits are products of vectors of 256. Matrix products take most of the time. For fp16 and bf16 operands they
    are in that dtype on CUDA, and in fp32 elsewhere."""
    rows, width, s = max(1, round(n**0.5)), 256, dtype.itemsize
    q, k = (tensor(n, dtype, device, seed, (rows, width)) for seed in range(2))
    target = torch.arange(rows, device=device)

    def theirs(q, k):
        return F.cross_entropy(F.normalize(q) @ F.normalize(k).T / 0.1, target)  # noqa: SO206

    return Case(
        (q, k),
        forward_bytes=2 * s,  # read q, k
        backward_bytes=4 * s,  # read q, k; write dq, dk
        ours=lambda q, k: safeops.info_nce_loss(q, k),
        eager={"F.cross_entropy(F.normalize(q) @ F.normalize(k).T / t, arange)": theirs},
        compiled=theirs,
        variant=True,
        arithmetic=True,
        aten=theirs,
        counted=False,
    )


@case("supervised_contrastive_loss")
def supervised_contrastive_loss(n, dtype, device):
    """n logits are products of vectors of 256, and each label has two rows. The pattern is that of the loss's
    authors."""
    rows, width, s = max(2, round(n**0.5)), 256, dtype.itemsize
    x, labels = tensor(n, dtype, device, 0, (rows, width)), torch.arange(rows, device=device) // 2

    def theirs(x):
        x = F.normalize(x)
        logits = x @ x.T / 0.07
        others = 1 - torch.eye(rows, dtype=x.dtype, device=device)
        positive = (labels[:, None] == labels) * others
        logits = logits - logits.amax(1, keepdim=True).detach()
        log_p = logits - (logits.exp() * others).sum(1, keepdim=True).log()
        return -((positive * log_p).sum(1) / positive.sum(1)).mean()

    return Case(
        (x,),
        forward_bytes=s,  # read x
        backward_bytes=2 * s,  # read x; write dx
        ours=lambda x: safeops.supervised_contrastive_loss(x, labels),
        eager={"SupConLoss of F.normalize(x)": theirs},
        compiled=theirs,
        variant=True,
        arithmetic=True,
        aten=theirs,
        counted=False,
    )


@case("si_sdr_loss")
def si_sdr_loss(n, dtype, device):
    """The loss takes several passes (normalize, sums, and steps between them), so it moves several times the bytes that
    are counted for it."""
    shape, s = SHAPES["_32768"](n)[0], dtype.itemsize

    def theirs(x, target, eps=1e-8):
        """Computes the loss by the formula of torchmetrics and asteroid."""
        alpha = ((x * target).sum(-1, keepdim=True) + eps) / (target.square().sum(-1, keepdim=True) + eps)
        signal = alpha * target
        ratio = (signal.square().sum(-1) + eps) / ((signal - x).square().sum(-1) + eps)
        return -10 * torch.log10(ratio).mean()

    return Case(
        (tensor(n, dtype, device, 0, shape), tensor(n, dtype, device, 1, shape)),
        forward_bytes=2 * s,  # read x, s
        backward_bytes=4 * s,  # read x, s; write dx, ds
        ours=safeops.si_sdr_loss,
        eager={"scale_invariant_signal_distortion_ratio(x, s)": theirs},
        compiled=theirs,
        variant=True,
        counted=False,
    )


for _suffix in SHAPES:
    normalize(_suffix)
    cosine_similarity(_suffix)

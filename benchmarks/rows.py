"""The functions of rows: softmax, normalize, cosine similarity, over rows of several lengths and over the channels of
images; cross entropy, and the loss of log probabilities. The input is read once in each direction, the output written
once."""

import torch
import torch.nn.functional as F

import safeops
from safeops.core.domain import box

from .case import ROW, Case, case, data, keep_mask

SIDE = 56  # pixels of an image's edge

# rows -> (shape, dim) of about n elements
SHAPES = {
    "": lambda n: ((max(1, n // ROW), min(ROW, n)), -1),
    "_64": lambda n: ((max(1, n // 64), 64), -1),
    "_32768": lambda n: ((max(1, n // 32768), 32768), -1),
    "_channels": lambda n: ((max(1, n // (64 * SIDE * SIDE)), 64, SIDE, SIDE), 1),
}


def _tensor(n, dtype, device, seed, shape):
    return data(torch.Size(shape).numel(), dtype, device, seed, shape=shape)


def softmax(name, function, suffix):
    @case(name + suffix)
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        ours = getattr(safeops, name)
        x = _tensor(n, dtype, device, 0, shape)
        mask = keep_mask(x.numel(), device).view(shape)

        def pattern(x):
            return function(x.masked_fill(~mask, float("-inf")), dim)

        return Case(
            (x,),
            forward_bytes=2 * s + 1,  # read x, mask; write y
            backward_bytes=3 * s + 1,  # read dy, x, mask; write dx
            ours=lambda x: ours(x, mask, dim),
            eager={f"{function.__name__}(x.masked_fill(~m, -inf))": pattern},
            compiled=pattern,
            variant=bool(suffix),
            aten=lambda x: function(x, dim),
            arithmetic=True,
        )


@case("softmax_no_mask")
def plain_softmax(n, dtype, device):
    """Beside torch's own softmax, which has no mask: the same bytes."""
    shape, dim = SHAPES[""](n)
    s = dtype.itemsize
    return Case(
        (_tensor(n, dtype, device, 0, shape),),
        forward_bytes=2 * s,  # read x; write y
        backward_bytes=3 * s,  # read dy, x; write dx
        ours=lambda x: safeops.masked_softmax(x, dim=dim),
        eager={"x.softmax(-1)": lambda x: x.softmax(dim)},
        compiled=lambda x: x.softmax(dim),
        variant=True,
    )


def normalize(suffix):
    @case("normalize" + suffix)
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        return Case(
            (_tensor(n, dtype, device, 0, shape),),
            forward_bytes=2 * s,  # read x; write y
            backward_bytes=3 * s,  # read dy, x; write dx
            ours=lambda x: safeops.normalize(x, dim=dim),
            eager={"F.normalize(x)": lambda x: F.normalize(x, dim=dim)},
            compiled=lambda x: F.normalize(x, dim=dim),
            variant=bool(suffix),
            aten=lambda x: torch.softmax(x, dim),  # torch has no normalize in one op
        )


def cosine_similarity(suffix):
    @case("cosine_similarity" + suffix)
    def build(n, dtype, device):
        shape, dim = SHAPES[suffix](n)
        s = dtype.itemsize
        return Case(
            (_tensor(n, dtype, device, 0, shape), _tensor(n, dtype, device, 1, shape)),
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
    """Made of cosine_similarity: its bytes, and no others of the vectors."""
    shape, s = SHAPES[""](n)[0], dtype.itemsize
    signs = keep_mask(shape[0], device) * 2 - 1
    return Case(
        (_tensor(n, dtype, device, 0, shape), _tensor(n, dtype, device, 1, shape)),
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
        tuple(_tensor(n, dtype, device, seed, shape) for seed in range(3)),
        forward_bytes=3 * s,  # read a, b, c
        backward_bytes=6 * s,  # read a, b, c; write da, db, dc
        ours=lambda a, b, c: safeops.triplet_margin_loss(a, b, c),
        eager={"F.triplet_margin_loss(a, b, c)": F.triplet_margin_loss},
        compiled=F.triplet_margin_loss,
        variant=True,
    )


@case("box_iou_loss")
def box_iou_loss(n, dtype, device):
    """An element is an edge."""
    n, s = n - n % 4, dtype.itemsize
    boxes = [box(_tensor(n, dtype, device, seed, (n // 4, 4)).detach()).requires_grad_() for seed in range(2)]

    def usual(a, b):
        """As torchvision writes generalized_box_iou_loss."""
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
    )


@case("multi_margin_loss")
def multi_margin_loss(n, dtype, device):
    shape, s = SHAPES[""](n)[0], dtype.itemsize
    index = torch.randint(shape[1], shape[:1], generator=torch.Generator(device).manual_seed(3), device=device)
    wide = {"F.multi_margin_loss(x, y)": lambda x: F.multi_margin_loss(x.float(), index)}  # it knows no half on the CPU
    return Case(
        (_tensor(n, dtype, device, 0, shape),),
        forward_bytes=s,  # read x
        backward_bytes=2 * s,  # read x; write dx
        ours=lambda x: safeops.multi_margin_loss(x, index),
        eager=wide,
        compiled=lambda x: F.multi_margin_loss(x.float(), index),
        variant=True,
    )


@case("multilabel_margin_loss")
def multilabel_margin_loss(n, dtype, device):
    """Two sorts of each row, and no pairs of classes: its bytes are a floor far below it."""
    shape, s = SHAPES[""](n)[0], dtype.itemsize
    generator = torch.Generator(device).manual_seed(3)
    index = torch.randint(shape[1], (shape[0], 8), generator=generator, device=device)
    y = F.pad(index, (0, shape[1] - 8), value=-1)
    wide = {"F.multilabel_margin_loss(x, y)": lambda x: F.multilabel_margin_loss(x.float(), y)}  # knows no half
    return Case(
        (_tensor(n, dtype, device, 0, shape),),
        forward_bytes=s + 8,  # read x, y
        backward_bytes=s + 8,  # read the classes; write dx
        ours=lambda x: safeops.multilabel_margin_loss(x, y),
        eager=wide,
        compiled=lambda x: F.multilabel_margin_loss(x.float(), y),
        variant=True,
    )


@case("multilabel_soft_margin_loss")
def multilabel_soft_margin_loss(n, dtype, device):
    """Its mean is that of binary_cross_entropy_with_logits."""
    shape, s = SHAPES[""](n)[0], dtype.itemsize
    y = _tensor(n, dtype, device, 1, shape).detach().sigmoid()
    return Case(
        (_tensor(n, dtype, device, 0, shape),),
        forward_bytes=2 * s,  # read x, y
        backward_bytes=3 * s,  # read x, y; write dx
        ours=lambda x: safeops.multilabel_soft_margin_loss(x, y),
        eager={"F.multilabel_soft_margin_loss(x, y)": lambda x: F.multilabel_soft_margin_loss(x, y)},
        compiled=lambda x: F.multilabel_soft_margin_loss(x, y),
        variant=True,
    )


@case("info_nce_loss")
def info_nce_loss(n, dtype, device):
    """n logits, of vectors of 256: mostly a product, of half operands in half on CUDA, elsewhere in fp32."""
    rows, width, s = max(1, round(n**0.5)), 256, dtype.itemsize
    q, k = (_tensor(n, dtype, device, seed, (rows, width)) for seed in range(2))
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
    )


@case("supervised_contrastive_loss")
def supervised_contrastive_loss(n, dtype, device):
    """As info_nce_loss; of two views a row, as its authors wrote it."""
    rows, width, s = max(2, round(n**0.5)), 256, dtype.itemsize
    x, labels = _tensor(n, dtype, device, 0, (rows, width)), torch.arange(rows, device=device) // 2

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
    )


@case("si_sdr_loss")
def si_sdr_loss(n, dtype, device):
    """Made of normalize and sums, with steps between them, each a pass of its own: several times these bytes."""
    shape, s = SHAPES["_32768"](n)[0], dtype.itemsize

    def theirs(x, target, eps=1e-8):
        """As torchmetrics and asteroid write it."""
        alpha = ((x * target).sum(-1, keepdim=True) + eps) / (target.square().sum(-1, keepdim=True) + eps)
        signal = alpha * target
        ratio = (signal.square().sum(-1) + eps) / ((signal - x).square().sum(-1) + eps)
        return -10 * torch.log10(ratio).mean()

    return Case(
        (_tensor(n, dtype, device, 0, shape), _tensor(n, dtype, device, 1, shape)),
        forward_bytes=2 * s,  # read x, s
        backward_bytes=4 * s,  # read x, s; write dx, ds
        ours=safeops.si_sdr_loss,
        eager={"scale_invariant_signal_distortion_ratio(x, s)": theirs},
        compiled=theirs,
        variant=True,
    )


def model(rows, classes):
    return lambda n: (rows, classes) if n >= ROW * ROW else (1, classes)


# rows -> shape of about n logits, or of a language model's, however large n is
LOGITS = {
    "": lambda n: (max(1, n // 32000), min(32000, n)),
    "_131072": lambda n: (max(1, n // 131072), min(131072, n)),
    "_1024": lambda n: (max(1, n // 1024), min(1024, n)),
    "_images": lambda n: (max(1, n // (21 * SIDE * SIDE)), 21, SIDE, SIDE),
    **{f"_{rows}x{classes}": model(rows, classes) for rows, classes in ((1024, 32000), (4096, 32000), (128, 131072))},
}


def classification(name, suffix, **options):
    """options: of both ours and torch's function."""

    @case(name + suffix)
    def build(n, dtype, device):
        shape = LOGITS[suffix.removesuffix("_smoothing")](n)
        s = dtype.itemsize
        x = _tensor(n, dtype, device, 0, shape)
        generator = torch.Generator(device).manual_seed(1)
        rows = (shape[0], *shape[2:])
        target = torch.randint(0, shape[1], rows, generator=generator, device=device)
        function, its_twin = getattr(safeops, name), getattr(F, name)

        def theirs(x):
            return its_twin(x, target, **options)

        reads = name == "cross_entropy"  # nll_loss looks at one element of each row
        return Case(
            (x,),
            forward_bytes=s if reads else (8 + s) / shape[1],  # read x; or its class and one element of each row
            backward_bytes=2 * s if reads else s,  # read x; write dx
            ours=lambda x: function(x, target, **options),
            eager={f"F.{name}(x, target)": theirs},
            compiled=theirs,
            variant=bool(suffix),
            aten=theirs,
            arithmetic=reads,
        )


def softmax_focal_loss(suffix):
    """cross_entropy, and numbers of each row."""

    @case("softmax_focal_loss" + suffix)
    def build(n, dtype, device):
        shape, s = LOGITS[suffix](n), dtype.itemsize
        generator = torch.Generator(device).manual_seed(1)
        target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator, device=device)

        def theirs(x):
            loss = F.cross_entropy(x, target, reduction="none")
            return ((1 - torch.exp(-loss)) ** 2 * loss).mean()

        return Case(
            (_tensor(n, dtype, device, 0, shape),),
            forward_bytes=s,  # read x
            backward_bytes=2 * s,  # read x; write dx
            ours=lambda x: safeops.softmax_focal_loss(x, target),
            eager={'loss = F.cross_entropy(x, target, reduction="none"); ((1 - exp(-loss))^2 loss).mean()': theirs},
            compiled=theirs,
            variant=bool(suffix),
            aten=theirs,
            arithmetic=True,
        )


def token_log_probs(suffix, with_argmax):
    """The log probability of each row's class, and its entropy, as RL losses take them: added, for one upstream."""

    @case("token_log_probs" + suffix)
    def build(n, dtype, device):
        rows, classes = shape = LOGITS[""](n)
        target = torch.randint(0, classes, (rows,), generator=torch.Generator(device).manual_seed(1), device=device)

        def ours(x):
            got = safeops.token_log_probs(x, target, with_argmax=with_argmax)
            return got.log_prob + got.entropy

        def theirs(x):
            result = _log_prob_and_entropy(x.float().log_softmax(-1), target)
            return result + 0 * (x.argmax(-1) == target) if with_argmax else result

        return Case(
            (_tensor(n, dtype, device, 0, shape),),
            forward_bytes=dtype.itemsize,  # read x
            backward_bytes=2 * dtype.itemsize,  # read x; write dx
            ours=ours,
            eager={"x.float().log_softmax(-1), gathered, and its entropy" + ", argmax" * with_argmax: theirs},
            compiled=theirs,
            aten=lambda x: F.cross_entropy(x, target, reduction="none"),
            variant=with_argmax,
            arithmetic=True,
        )


def linear(name, pattern, theirs, ours):
    """theirs, ours: of x, w and the rows' classes."""

    @case(name)
    def build(n, dtype, device):
        """n logits, of vectors of 1024: products, as of the layer and its loss, which keep all logits."""
        (rows, classes), width, s = LOGITS[""](n), 1024, dtype.itemsize
        x = _tensor(n, dtype, device, 0, (rows, width))
        w = data(classes * width, dtype, device, 1, grad=False, shape=(classes, width)).mul_(0.05).requires_grad_()
        target = torch.randint(0, classes, (rows,), generator=torch.Generator(device).manual_seed(2), device=device)
        each = (1 + w.numel() / x.numel()) * s  # read x, w

        def bound(function):
            return lambda x, w: function(x, w, target)

        return Case(
            (x, w),
            forward_bytes=each,
            backward_bytes=2 * each,  # read x, w; write dx, dw
            ours=bound(ours),
            eager={pattern: bound(theirs)},  # (torch's own refuses a second backward)
            compiled=bound(theirs),
            variant=True,
            arithmetic=True,
            aten=bound(theirs),
        )


def _log_prob_and_entropy(log_p, target):
    return log_p.gather(-1, target[:, None]).squeeze(-1) - (log_p.exp() * log_p).sum(-1)


def _linear_token_log_probs(x, w, target):
    got = safeops.linear_token_log_probs(x, w, target)
    return got.log_prob + got.entropy


linear(
    "linear_cross_entropy",
    "F.cross_entropy(F.linear(x, w), y)",
    lambda x, w, target: F.cross_entropy(F.linear(x, w), target),
    safeops.linear_cross_entropy,
)
linear(
    "linear_token_log_probs",
    "F.linear(x, w).float().log_softmax(-1), gathered, and its entropy",
    lambda x, w, target: _log_prob_and_entropy(F.linear(x, w).float().log_softmax(-1), target),
    _linear_token_log_probs,
)


for _suffix in SHAPES:
    softmax("masked_softmax", torch.softmax, _suffix)
    normalize(_suffix)
    cosine_similarity(_suffix)
softmax("masked_log_softmax", torch.log_softmax, "")
token_log_probs("", False)
token_log_probs("_argmax", True)
for _suffix in LOGITS:
    classification("cross_entropy", _suffix)
classification("cross_entropy", "_smoothing", label_smoothing=0.1)
classification("nll_loss", "")
for _suffix in ("", "_images"):
    softmax_focal_loss(_suffix)

"""Contests of pointwise losses with a mask, the focal loss, and divergences of probability distributions."""

import torch
import torch.nn.functional as F

import safeops

from ..losses import focal, jensen_shannon
from .contest import Contest, compiled, contests, library

N = 1 << 26


def masked(o, name, domain=None):
    """Makes the contest. name: that of the function in safeops and in torch.nn.functional. domain: maps the target to
    where the loss is defined."""
    n, s = o.size(N), o.itemsize
    ours, theirs = getattr(safeops, name), getattr(F, name)
    target = o.normal(n, seed=1)

    def plain(x, y, m):
        return (theirs(x, y, reduction="none") * m).sum() / m.sum()

    return Contest(
        (o.normal(n),),
        (domain(target) if domain else target, o.mask(n)),
        ours=lambda x, y, m: ours(x, y, mask=m),
        rivals={
            "f(x[m],y[m])": lambda x, y, m: theirs(x[m], y[m]),
            "(f*m).sum()/m.sum()": plain,
            "compile": compiled(plain),
        },
        definition=plain,
        bytes=((2 * s + 1) * n, (5 * s + 2) * n),  # read x, y, m; read x, y, m, write dx
    )


def sigmoid_focal_loss(o):
    shape, s = o.size(N >> 10, 1 << 10), o.itemsize
    n = shape[0] * shape[1]

    def plain(x, y):
        return focal(x, y).mean()

    options = {"alpha": 0.25, "gamma": 2.0, "reduction": "mean"}
    return Contest(
        (o.normal(*shape),),
        (o.mask(*shape, share=0.3).to(o.dtype),),
        ours=lambda x, y: safeops.sigmoid_focal_loss(x, y),
        rivals={
            "formula": plain,
            "torchvision": library("torchvision.ops", "sigmoid_focal_loss", lambda f, x, y: f(x, y, reduction="mean")),
            "compile": compiled(plain),
            "kornia": library("kornia.losses", "binary_focal_loss_with_logits", lambda f, x, y: f(x, y, **options)),
        },
        definition=plain,
        bytes=(2 * s * n, 5 * s * n),  # read x, y; read x, y, write dx
    )


def of_distributions(plain, name, ours, liger, backward, inputs=lambda p: (p,)):
    """Returns a function that makes the contest. liger: (name, options, call) for `library`. backward: how many tensors
    the backward reads and writes. inputs: maps the probabilities p to all functions' operands, ours first."""

    def build(o):
        shape, s = o.size(4096, 32000), o.itemsize
        n = shape[0] * shape[1]
        x, y = (o.normal(*shape, seed=seed).softmax(-1) for seed in (0, 1))
        module, options, call = liger
        return Contest(
            inputs(x),
            inputs(y) if name != "F.kl_div" else (y,),
            ours=ours,
            rivals={
                name: plain,
                "compile": compiled(plain),
                "liger": library("liger_kernel.transformers", module, call, options=options, cuda=True),
            },
            definition=plain,
            bytes=(2 * s * n, (2 + backward) * s * n),
        )

    return build


def tvd(x, y):
    return (x - y).abs().sum() * (0.5 / x.shape[0])


def js(x, log_x, y, log_y):
    return jensen_shannon(x, y).sum() / x.shape[0]


contests(
    masked,
    {
        "mse_loss/bf16": ("bf16", "mse_loss"),
        "bce_with_logits/bf16": ("bf16", "binary_cross_entropy_with_logits", torch.sigmoid),
        "smooth_l1_loss/bf16": ("bf16", "smooth_l1_loss"),
        "huber_loss/bf16": ("bf16", "huber_loss"),
    },
)
contests(sigmoid_focal_loss, {"sigmoid_focal_loss/bf16": ("bf16",)})
contests(
    of_distributions(
        lambda x, y: F.kl_div(x, y, reduction="batchmean"),
        "F.kl_div",
        lambda x, y: safeops.kl_div(x, y, reduction="batchmean"),
        ("LigerKLDIVLoss", {"reduction": "batchmean"}, lambda f, x, y: f(x, y)),
        2,  # read y, write dx
        inputs=lambda p: (p.log(),),
    ),
    {"kl_div/bf16": ("bf16",)},
)
contests(  # the functions get p and log p, since Liger takes logarithms and ours probabilities
    of_distributions(
        js,
        "p log(p/m)..",
        lambda x, log_x, y, log_y: safeops.js_div(x, y, reduction="batchmean"),
        ("LigerJSD", {}, lambda f, x, log_x, y, log_y: f(log_x, log_y)),
        3,  # read x, y, write dx
        inputs=lambda p: (p, p.log()),
    ),
    {"js_div/bf16": ("bf16",)},
)
contests(
    of_distributions(
        tvd,
        "0.5 |x-y|.sum()",
        lambda x, y: safeops.l1_loss(x, y, reduction="sum") * (0.5 / x.shape[0]),
        ("LigerTVDLoss", {}, lambda f, x, y: f(x, y)),
        3,
    ),
    {"tvd/bf16": ("bf16",)},
)

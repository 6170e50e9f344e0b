"""Contests of divergences between a student's and a teacher's logits: from logits, and fused with the last layers of
both."""

import math

import torch.nn.functional as F

import safeops

from .classification import fla
from .contest import FLOOR, Contest, compiled, contests, library, pattern, wide


def log_p(x):
    return wide(x).log_softmax(-1)


def kl(x, y):
    return F.kl_div(log_p(x), log_p(y), reduction="batchmean", log_target=True)


def reverse_kl(x, y):
    return kl(y, x)


def js(x, y):
    both = log_p(x), log_p(y)
    m = both[0].logaddexp(both[1]) - math.log(2)
    return sum(F.kl_div(m, each, reduction="batchmean", log_target=True) for each in both) / 2


def tv(x, y):
    return (wide(x).softmax(-1) - wide(y).softmax(-1)).abs().sum(-1).mean() / 2


def liger(name, call, **options):
    """Makes a Rival of a divergence of Liger, which takes (log-)probabilities. `call` computes these in fp32, since
    Liger's result has their dtype."""
    return library("liger_kernel.transformers", name, call, options=options, cuda=True)


def liger_kl(f, x, y):
    return f(log_p(x), log_p(y))


LOGITS = {
    "kl_div_with_logits": (kl, liger("LigerKLDIVLoss", liger_kl, reduction="batchmean", log_target=True)),
    "reverse_kl_div_with_logits": (reverse_kl, liger("LigerJSD", liger_kl, beta=1.0)),
    "js_div_with_logits": (js, liger("LigerJSD", liger_kl)),
    "tv_with_logits": (tv, liger("LigerTVDLoss", lambda f, x, y: f(wide(x).softmax(-1), wide(y).softmax(-1)))),
}


def of_logits(o, name):
    shape, s = o.size(4096, 32000), o.itemsize
    n, ours, (plain, theirs) = shape[0] * shape[1], getattr(safeops, name), LOGITS[name]
    return Contest(
        (o.normal(*shape),),
        (o.normal(*shape, seed=1),),
        ours=lambda x, y: ours(x, y),
        rivals={"both softmax in fp32": plain, "compile": compiled(plain), "liger": theirs},
        definition=plain,
        bytes=(2 * s * n, 5 * s * n),  # read x, y; read x, y, write dx
    )


def liger_layers(beta):
    """Makes a Rival of Liger's fused divergence. beta: 0 for kl (from the teacher), 1 for reverse kl (from the
    student), 0.5 for js."""
    return library(
        "liger_kernel.transformers",
        "LigerFusedLinearJSD",
        lambda f, x, w, y, v: f(x, w, y, v, None),
        options={"jsd_beta": beta},
        cuda=True,
    )


def trl_layers(beta):
    return library(
        "trl.kernels.chunked_divergence",
        "ChunkedDivergenceFunction",
        lambda f, x, w, y, v: f.apply(x, w, None, y, v, None, beta)[0].mean(),
    )


LAYERS = {
    "linear_kl_div": (
        kl,
        {
            "liger": liger_layers(0.0),
            "trl": trl_layers(0.0),
            "fla": fla("FusedKLDivLoss", lambda f, x, w, y, v: f(x, y, w, v), options={}),
        },
    ),
    "linear_reverse_kl_div": (reverse_kl, {"liger": liger_layers(1.0), "trl": trl_layers(1.0)}),
    "linear_js_div": (js, {"liger": liger_layers(0.5), "trl": trl_layers(0.5)}),
    "linear_tv": (tv, {}),
}


def of_layers(o, name):
    rows, width, classes = o.size(4096, 4096, 32000)
    ours, (plain, libraries), flops = getattr(safeops, name), LAYERS[name], 2 * rows * width * classes
    # The logits have a standard deviation of 4 for any width. If the two distributions were closer, the rounding of the
    # logits would decide which probability is larger, and so the sign of total variation's gradient.
    spread = 4 / width**0.5

    def layers(x, w, y, v):
        return plain(F.linear(x, w), F.linear(y, v))

    def product(x, w, y, v):
        return x @ w.T

    return Contest(
        (o.normal(rows, width), o.normal(classes, width, seed=1).mul_(spread)),
        (o.normal(rows, width, seed=2), o.normal(classes, width, seed=3).mul_(spread)),
        ours=lambda x, w, y, v: ours(x, w, y, v),
        rivals={
            "of both F.linear": layers,
            "compile": compiled(layers),
            **libraries,
            f"{FLOOR}x @ w.T": pattern(product, backward=False, other="a product"),
        },
        definition=layers,
        flops=(2 * flops, 4 * flops),  # x w, y v; and dx, dw
    )


contests(of_logits, {f"{name}/bf16": ("bf16", name) for name in LOGITS})
contests(of_layers, {f"{name}/bf16": ("bf16", name) for name in LAYERS})

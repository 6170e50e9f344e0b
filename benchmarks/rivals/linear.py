"""Contests of a last linear layer fused with its loss: cross entropy, and log probabilities plus entropy; and of a head
with an adapter."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import safeops

from .classification import added, fla, log_prob_and_entropy
from .contest import FLOOR, Absent, Contest, Rival, compiled, contests, library, pattern, wide


def linear(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def linear_widened(x, w, target):
    return F.cross_entropy(wide(F.linear(x, w)), target)


def liger(**options):
    return library(
        "liger_kernel.transformers",
        "LigerFusedLinearCrossEntropyLoss",
        lambda f, x, w, target: f(w, x, target),
        options=options,
        cuda=True,
    )


def cut(**options):
    # cce's gradient skips classes of small probability: in bf16 an error of 3e-2 of the largest gradient.
    return library(
        "cut_cross_entropy",
        "linear_cross_entropy",
        lambda f, x, w, target: f(x, w, target, **options),
        cuda=True,
        other="filters its gradient",
    )


def chunked():
    """Makes a Rival of torch's own function, run in chunks that keep no logits."""

    def load():
        if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
            raise Absent(f"torch {torch.__version__} has no F.linear_cross_entropy by chunks")
        options = torch.nn.LinearCrossEntropyOptions()
        return lambda x, w, target: F.linear_cross_entropy(x, w, target, options=options)

    return Rival(load)


LAYERS = {
    "F.ce(F.linear)": linear,
    "F.ce(F.linear.float())": linear_widened,
    "F.linear_cross_entropy": chunked(),
    "compile": compiled(linear_widened),
    "liger": liger(),
    "liger fp32 sums": liger(accum_dtype=torch.float32),
    "fla": fla("FusedLinearCrossEntropyLoss", lambda f, x, w, target: f(x, target, w), options={}),
}
# cce has a contest of its own: its backward uses spin locks, which sometimes hang under Triton 3.6 on Hopper.
CUT = {"cce": cut(), "cce exact": cut(filter_eps=None)}


def linear_cross_entropy(o, rows, rivals):
    rows, width, classes = o.size(rows, 4096, 128256)
    flops = 2 * rows * width * classes
    return Contest(
        (o.normal(rows, width), o.normal(classes, width, seed=1).mul_(0.02)),
        (o.index(classes, rows),),
        ours=lambda x, w, target: safeops.linear_cross_entropy(x, w, target),
        rivals={**rivals, f"{FLOOR}x @ w.T": pattern(lambda x, w, target: x @ w.T, backward=False, other="a product")},
        definition=linear,
        flops=(flops, 3 * flops),
    )


def layer(x, w, target):
    return log_prob_and_entropy(F.linear(x, w), target)


TRL_CLASSES = 32768  # classes in a chunk of TRL


def linear_token_log_probs(o):
    rows, width, classes = o.size(8192, 4096, 128256)
    flops = 2 * rows * width * classes
    return Contest(
        (o.normal(rows, width), o.normal(classes, width, seed=1).mul_(0.02)),
        (o.index(classes, rows),),
        ours=lambda x, w, target: added(safeops.linear_token_log_probs(x, w, target)),
        rivals={
            "of F.linear": layer,
            "compile": compiled(layer),
            "trl": library(
                "trl.kernels",
                "ChunkedLogProbFunction",
                lambda f, x, w, target: added(
                    f.apply(x, w, None, target, 1.0, min(TRL_CLASSES, w.shape[0]), None, 1.0, ("entropy",))
                ),
            ),
            f"{FLOOR}x @ w.T": pattern(lambda x, w, target: x @ w.T, backward=False, other="a product"),
        },
        definition=layer,
        flops=(flops, 3 * flops),
    )


ADAPTER, ROWS_OF_CHUNK = 16, 1024


def adapted(x, a, b, w):
    """The logits of a frozen layer with an adapter, as peft computes them."""
    return F.linear(x, w) + F.linear(F.linear(x, a), b)


def unfused(x, a, b, w, target):
    return F.cross_entropy(adapted(x, a, b, w), target)


def unfused_widened(x, a, b, w, target):
    return F.cross_entropy(wide(adapted(x, a, b, w)), target)


def checkpointed(x, a, b, w, target):
    """The head by chunks of rows, run again in backward: how trainers write it by hand."""

    def loss(x, target):
        return F.cross_entropy(wide(adapted(x, a, b, w)), target, reduction="sum")

    parts = zip(x.split(ROWS_OF_CHUNK), target.split(ROWS_OF_CHUNK))
    return sum(checkpoint(loss, *part, use_reentrant=False) for part in parts) / len(x)


def head_loss(o, rows):
    """Liger's and TRL's losses take a weight: they have no contender for a module."""
    rows, width, classes = o.size(rows, 4096, 128256)
    product, adapter = 2 * rows * width * classes, 2 * rows * ADAPTER * (width + classes)
    return Contest(
        (
            o.normal(rows, width),
            o.normal(ADAPTER, width, seed=1).mul_(0.02),
            o.normal(classes, ADAPTER, seed=2).mul_(0.02),
        ),
        (o.normal(classes, width, seed=3).mul_(0.02), o.index(classes, rows)),
        ours=lambda x, a, b, w, target: safeops.head_loss(lambda x: adapted(x, a, b, w), x, target),
        rivals={
            "F.ce(head)": unfused,
            "F.ce(head.float())": unfused_widened,
            "compile": compiled(unfused_widened),
            "checkpointed chunks": checkpointed,
        },
        definition=unfused,
        flops=(product + adapter, 2 * product + 3 * adapter),
    )


contests(
    linear_cross_entropy,
    {
        "linear_cross_entropy/bf16/8192": ("bf16", 8192, LAYERS),
        "linear_cross_entropy/bf16/4096": ("bf16", 4096, LAYERS),
        "linear_cross_entropy/bf16/8192/cce": ("bf16", 8192, CUT),
    },
)
contests(linear_token_log_probs, {"linear_token_log_probs/bf16": ("bf16",)})
contests(head_loss, {"head_loss/bf16": ("bf16", 8192), "head_loss/fp32": ("fp32", 2048)})

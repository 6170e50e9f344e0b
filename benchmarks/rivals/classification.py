"""Contests of masked softmax; of cross entropy, for a language model's logits and for images; and of log probabilities
and entropy, as losses of reinforcement learning use them. These two are added, so that there is one result."""

import importlib.util
import math

import torch
import torch.nn.functional as F

import safeops

from .contest import Contest, compiled, contests, library, wide

INF = float("inf")


def plain(x, target):
    return F.cross_entropy(x, target)


def widened(x, target):
    return F.cross_entropy(wide(x), target)


def fla(name, call, **flags):
    """Makes a Rival of a loss of flash-linear-attention. It disables the library's Gluon backend, which is imported
    even though it is off by default, and whose import fails under Triton 3.6."""
    rival = library("fla.modules", name, call, cuda=True, **flags)

    def load():
        if importlib.util.find_spec("fla"):
            importlib.import_module("fla.backends").GluonBackend.is_available = classmethod(lambda backend: False)
        return rival.load()

    return rival._replace(load=load)


LIBRARIES = {
    "liger*": library(
        "liger_kernel.transformers",
        "LigerCrossEntropyLoss",
        lambda f, x, target: f(x, target),
        options={},
        overwrites=True,
        cuda=True,
    ),
    "fla": fla("FusedCrossEntropyLoss", lambda f, x, target: f(x, target), options={}),
    "fla*": fla(
        "FusedCrossEntropyLoss",
        lambda f, x, target: f(x, target),
        options={"inplace_backward": True},
        overwrites=True,
    ),
}
PERMUTED = library(
    "liger_kernel.transformers",
    "LigerCrossEntropyLoss",
    lambda f, x, target: f(x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]), target.reshape(-1)),
    options={},
    cuda=True,
)


def cross_entropy(o, *shape):
    """Makes the contest. shape: (N, C), or (N, C, H, W) of images."""
    shape, s = o.size(*shape), o.itemsize
    n, images = math.prod(shape), len(shape) == 4
    classes = 8 * n // shape[1] if images else 0  # bytes of the target, which are negligible for long rows
    half = {} if o.dtype == torch.float32 else {"F.cross_entropy(x.float())": widened}
    return Contest(
        (o.normal(*shape),),
        (o.index(shape[1], shape[0], *shape[2:]),),
        ours=lambda x, target: safeops.cross_entropy(x, target),
        rivals={"F.cross_entropy": plain, **half, "compile": compiled(widened)}
        | ({"liger, permuted": PERMUTED} if images else LIBRARIES),
        definition=plain,
        bytes=(s * n + classes, 3 * s * n + 2 * classes),  # forward: read x; backward: read x, write dx
    )


def log_prob_and_entropy(x, target):
    log_p = wide(x).log_softmax(-1)
    return log_p.gather(-1, target[:, None]).squeeze(-1) - (log_p.exp() * log_p).sum(-1)


def added(results):
    return results[0] + results[1]


def token_log_probs(o, rows, classes):
    shape, s = o.size(rows, classes), o.itemsize
    n = shape[0] * shape[1]
    return Contest(
        (o.normal(*shape),),
        (o.index(shape[1], shape[0]),),
        ours=lambda x, target: added(safeops.token_log_probs(x, target)),
        rivals={
            "log_softmax in fp32, gathered": log_prob_and_entropy,
            "compile": compiled(log_prob_and_entropy),
            "trl": library(
                "trl.trainer.utils", "selective_log_softmax_and_entropy", lambda f, x, target: added(f(x, target))
            ),
        },
        definition=log_prob_and_entropy,
        bytes=(s * n, 3 * s * n),  # forward: read x; backward: read x, write dx
    )


def softmax(o, *shape):
    shape, s = o.size(*shape), o.itemsize
    n = shape[0] * shape[1]

    def plain(x, m):
        return x.masked_fill(~m, -INF).softmax(-1)

    return Contest(
        (o.normal(*shape),),
        (o.mask(*shape),),
        ours=lambda x, m: safeops.masked_softmax(x, m),
        rivals={
            "masked_fill.softmax": plain,
            "torch.masked.softmax": lambda x, m: torch.masked.softmax(x, -1, mask=m),
            "compile": compiled(plain),
            "masked_fill.liger": library(
                "liger_kernel.transformers",
                "LigerSoftmax",
                lambda softmax, x, m: softmax(x.masked_fill(~m, -INF)),
                options={},
                cuda=True,
            ),
        },
        definition=plain,
        bytes=((2 * s + 1) * n, (5 * s + 2) * n),  # read x, m, write y; read dy, x, m, write dx
    )


contests(
    cross_entropy,
    {
        "cross_entropy/bf16/32k": ("bf16", 4096, 32000),
        "cross_entropy/fp16/32k": ("fp16", 4096, 32000),
        "cross_entropy/fp32/32k": ("fp32", 4096, 32000),
        "cross_entropy/bf16/128k": ("bf16", 8192, 128256),
        "cross_entropy/bf16/images": ("bf16", 8, 21, 512, 512),
    },
)
contests(
    token_log_probs,
    {"token_log_probs/bf16/32k": ("bf16", 4096, 32000), "token_log_probs/bf16/128k": ("bf16", 8192, 128256)},
)
contests(
    softmax,
    {"masked_softmax/bf16/8192": ("bf16", 4096, 8192), "masked_softmax/bf16/1024": ("bf16", 16384, 1024)},
)

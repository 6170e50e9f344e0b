"""The log probability of each row's class and the row's entropy, as losses of reinforcement learning take them; added,
so that there is one result. Of logits, and together with the layer that makes them."""

import torch.nn.functional as F

import safeops

from .classification import wide
from .contest import FLOOR, Contest, compiled, contests, library, pattern


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
        bytes=(s * n, 3 * s * n),  # read x; read x, write dx
    )


def layer(x, w, target):
    return log_prob_and_entropy(F.linear(x, w), target)


TRL_CLASSES = 32768  # that TRL takes at a time


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


contests(
    token_log_probs,
    {"token_log_probs/bf16/32k": ("bf16", 4096, 32000), "token_log_probs/bf16/128k": ("bf16", 8192, 128256)},
)
contests(linear_token_log_probs, {"linear_token_log_probs/bf16": ("bf16",)})

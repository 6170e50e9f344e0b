"""Cross entropy: of a language model's logits, of images, and together with the layer that makes the logits."""

import importlib.util
import math

import torch
import torch.nn.functional as F

import safeops

from .contest import FLOOR, Absent, Contest, Rival, compiled, contests, library, pattern


def wide(x):
    """Half to fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def plain(x, target):
    return F.cross_entropy(x, target)


def widened(x, target):
    return F.cross_entropy(wide(x), target)


def fla(name, call, **flags):
    """A loss of flash-linear-attention, without its Gluon kernels: off by default, they are imported, and that fails
    under Triton 3.6."""
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
    """shape: (N, C), or (N, C, H, W) of images."""
    shape, s = o.size(*shape), o.itemsize
    n, images = math.prod(shape), len(shape) == 4
    classes = 8 * n // shape[1] if images else 0  # bytes of the target, of rows as good as none
    half = {} if o.dtype == torch.float32 else {"F.cross_entropy(x.float())": widened}
    return Contest(
        (o.normal(*shape),),
        (o.index(shape[1], shape[0], *shape[2:]),),
        ours=lambda x, target: safeops.cross_entropy(x, target),
        rivals={"F.cross_entropy": plain, **half, "compile": compiled(widened)}
        | ({"liger, permuted": PERMUTED} if images else LIBRARIES),
        definition=plain,
        bytes=(s * n + classes, 3 * s * n + 2 * classes),  # read x; read x, write dx
    )


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
    # Its gradient leaves out the classes of small probability: 3e-2 of the largest in bf16.
    return library(
        "cut_cross_entropy",
        "linear_cross_entropy",
        lambda f, x, w, target: f(x, w, target, **options),
        cuda=True,
        other="filters its gradient",
    )


def chunked():
    """torch's own by chunks, which keeps no logits."""

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
# In a contest of its own: its backward takes spin locks, which hang at times under Triton 3.6 on Hopper.
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
    linear_cross_entropy,
    {
        "linear_cross_entropy/bf16/8192": ("bf16", 8192, LAYERS),
        "linear_cross_entropy/bf16/4096": ("bf16", 4096, LAYERS),
        "linear_cross_entropy/bf16/8192/cce": ("bf16", 8192, CUT),
    },
)

"""Contests of losses of images."""

import math

import torch

import safeops

from ..images import _ssim
from .contest import Contest, compiled, contests, library

SSIM_SIDE = 11  # the window's edge, in pixels


def dice_loss(o):
    shape, s = o.size(16, 8, 512, 512), o.itemsize
    n, pixels = math.prod(shape), math.prod(shape) // shape[1]

    def one_hot(x, target):
        y = torch.zeros_like(x).scatter_(1, target.unsqueeze(1), 1)
        both, prediction, ground = (x * y).sum((2, 3)), x.sum((2, 3)), y.sum((2, 3))
        return (1 - (2 * both + 1e-5) / (prediction + ground + 1e-5)).mean()

    return Contest(
        (o.normal(*shape).softmax(1),),
        (o.index(shape[1], shape[0], *shape[2:]),),
        ours=lambda x, target: safeops.dice_loss(x, target),
        rivals={
            "one-hot": one_hot,
            "compile": compiled(one_hot),
            "monai": library(
                "monai.losses",
                "DiceLoss",
                lambda f, x, target: f(x, target.unsqueeze(1)),
                options={"to_onehot_y": True},
            ),
            "smp": library(
                "segmentation_models_pytorch.losses",
                "DiceLoss",
                lambda f, x, target: f(x, target),
                options={"mode": "multiclass", "from_logits": False},
                other="one sum for all images",
            ),
        },
        definition=one_hot,
        bytes=(s * n + 8 * pixels, 2 * s * n + 16 * pixels),  # read x, target; read target, write dx
    )


def ssim(o):
    shape, s = o.size(8, 3, 512, 512), o.itemsize
    n, x = math.prod(shape), o.normal(*shape).sigmoid()
    msssim = library(
        "pytorch_msssim", "SSIM", lambda f, x, y: f(x, y), options={"data_range": 1.0, "channel": shape[1]}
    )
    return Contest(
        (x,),
        (0.7 * x + 0.3 * o.normal(*shape, seed=1).sigmoid(),),  # similar to x: the SSIM of unrelated noise is about 0
        ours=lambda x, y: safeops.ssim(x, y),
        rivals={
            "five convolutions": _ssim,
            "compile": compiled(_ssim),
            "pytorch_msssim": msssim,
            "compile msssim": msssim._replace(compiled=True),
            "kornia": library(
                "kornia.losses",
                "ssim_loss",
                lambda f, x, y: 1 - 2 * f(x, y, SSIM_SIDE, padding="valid"),
            ),
            "fused-ssim": library("fused_ssim", "fused_ssim", lambda f, x, y: f(x, y, padding="valid"), cuda=True),
            "torchmetrics": library(
                "torchmetrics.functional.image",
                "structural_similarity_index_measure",
                lambda f, x, y: f(x, y, data_range=1.0),
                other="windows over the edge too, of the image mirrored",
            ),
        },
        definition=_ssim,
        bytes=(2 * s * n, 5 * s * n),  # read x, y; read x, y, write dx
    )


def total_variation(o):
    shape, s = o.size(16, 3, 1024, 1024), o.itemsize
    n = math.prod(shape)

    def plain(x):
        down, right = (x[..., 1:, :] - x[..., :-1, :]).abs(), (x[..., 1:] - x[..., :-1]).abs()
        return (down.sum((1, 2, 3)) + right.sum((1, 2, 3))).mean()

    return Contest(
        (o.normal(*shape),),
        (),
        ours=lambda x: safeops.total_variation(x),
        rivals={
            "|x[1:]-x[:-1]|": plain,
            "compile": compiled(plain),
            "kornia": library("kornia.losses", "total_variation", lambda f, x: f(x).sum(1).mean()),
        },
        definition=plain,
        bytes=(s * n, 3 * s * n),  # forward: read x; backward: read x, write dx
    )


contests(dice_loss, {"dice_loss/bf16": ("bf16",)})
contests(ssim, {"ssim/fp32": ("fp32",)})
contests(total_variation, {"total_variation/fp32": ("fp32",)})

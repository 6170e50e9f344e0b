"""Functions of whole images that are made of other ops: a number for each image, and its reduction."""

import torch

from safeops.core import loss_reduction


def over_all(total, count, reduction, empty_nan):
    """(the mean or sum, the share in it of each of those that `count` are), in fp64, of a sum that is 0 of nothing."""
    total, count = total.double(), count.double()
    value = torch.where(count > 0, total / count.clamp(min=1) if reduction == 1 else total, nothing(empty_nan))
    return value, 1 / count if reduction == 1 else torch.ones_like(count)


def nothing(empty_nan):
    return float("nan") if empty_nan else 0.0


def finish(name, values, count, dtype, reduction, empty):
    """The reduction over the images. values: (N,). count: how many kept elements each is made of."""
    exists = count > 0
    nothing = float("nan") if reduction == "none" and empty == "nan" else 0.0
    if reduction == "none" and empty == "raise":
        loss_reduction.raise_if_nothing_kept(name, exists.all(), values.shape, f"{values.numel()} images")
    values = torch.where(exists, values, nothing)
    return loss_reduction.reduce(name, values, exists, None, reduction, None, empty).to(dtype)


# The docstrings' text on arguments, in place of {arguments}.
ARGUMENTS = """\
        empty: value of a mean or sum over no image, and with "none" of an image of which nothing is kept: "zero"
            (attached to the graph, zero gradients), "nan", or "raise" (ValueError; synchronises to know, and cannot be
            compiled whole).

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or (N,) for "none".
"""

"""The mean or sum of numbers per image (psnr, lpips_distance, total_variation) or per window (SSIM)."""

import torch

from safeops.core import loss_reduction


def over_all(total, count, reduction, empty_nan):
    """Returns (mean (reduction 1) or sum, its derivative by each term), fp64. total: the sum of `count` terms."""
    total, count = total.double(), count.double()
    value = torch.where(count > 0, total / count.clamp(min=1) if reduction == 1 else total, nothing(empty_nan))
    return value, 1 / count if reduction == 1 else torch.ones_like(count)


def nothing(empty_nan):
    return float("nan") if empty_nan else 0.0


def finish(name, values, count, dtype, reduction, empty):
    """Reduce the images' values (N,). count: (N,), number of kept elements, or bool: True if an image has any."""
    exists = count > 0
    nothing = float("nan") if reduction == "none" and empty == "nan" else 0.0
    if reduction == "none" and empty == "raise":
        loss_reduction.raise_if_nothing_kept(name, exists.all(), values.shape, f"{values.numel()} images")
    values = torch.where(exists, values, nothing)
    return loss_reduction.reduce(name, values, exists, None, reduction, None, empty).to(dtype)


# The text that replaces {arguments} in each docstring.
ARGUMENTS = """\
        empty: value of a mean or sum over no image, and with "none" of an image with nothing kept: "zero" (attached to
            the graph, zero gradients), "nan", or "raise" (ValueError; the host waits for the device, so the call cannot
            be compiled whole).

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or (N,) for "none".
"""

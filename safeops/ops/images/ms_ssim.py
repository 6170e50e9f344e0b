"""ms_ssim: the structural similarity of images at several scales."""

import torch
import torch.nn.functional as F

from safeops.core import check, loss_reduction
from safeops.core.dtypes import LARGEST, compute_dtype
from safeops.ops.images._ssim import ARGUMENTS, PLANES, StructuralSimilarity, validate

NAME = "ms_ssim"
BETAS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)

_ms_ssim = StructuralSimilarity(NAME)


def validate_betas(betas):
    if not isinstance(betas, (tuple, list)):
        raise TypeError(f"{NAME}: betas must be a tuple of numbers, got {type(betas).__name__}")
    if not betas:
        raise ValueError(f"{NAME}: betas must have a number for each scale, got {betas!r}")
    for beta in betas:
        check.number(NAME, "betas", beta, above=0, maximum=LARGEST)


def halve(x, mask):
    """Images of half the size, whose pixels are means of the 2 x 2 that are kept."""
    if 0 in x.shape:  # which pooling refuses
        return x[(..., *[slice(None, None, 2)] * (x.dim() - 2))]
    pool = F.avg_pool2d if x.dim() == 4 else F.avg_pool3d
    options = {"kernel_size": 2, "ceil_mode": True, "count_include_pad": False}
    if mask is None:
        return pool(x, **options)
    share = pool(mask.to(x.dtype), **options)
    return pool(torch.where(mask, x, 0), **options) / torch.where(share > 0, share, 1)


def halve_mask(keep):
    """Which pixels of half the size exist: those that one of the 2 x 2 is kept of."""
    if 0 in keep.shape:
        return halve(keep, None)
    pool = F.max_pool2d if keep.dim() == 4 else F.max_pool3d
    return pool(keep.to(torch.float32), kernel_size=2, ceil_mode=True) > 0


def power(x, beta):
    """x^beta, and 0, with gradient 0, where x is not above 0; a NaN shows."""
    dead = x <= 0
    return torch.where(dead, 0, torch.where(dead, 1, x) ** beta)


@_ms_ssim.public(
    "(Tensor input, Tensor target, *, Tensor? mask=None, float data_range=1.0, int win_size=11, float win_sigma=1.5, "
    'float k1=0.01, float k2=0.03, str padding="valid", float[]? betas=None, str reduction="mean", str empty="zero") '
    "-> Tensor",
    arguments=ARGUMENTS,
)
def ms_ssim(
    input, target, *, mask=None, data_range=1.0, win_size=11, win_sigma=1.5, k1=0.01, k2=0.03, padding="valid",
    betas=None, reduction="mean", empty="zero",
):  # fmt: skip
    """Multi-scale SSIM: the product over the scales of contrast^beta, at the last one of SSIM^beta, for each plane.

    From scale to scale the images are averaged over 2 x 2 pixels, those that are kept; an odd border averages what
    there is. A contrast (or, last, an SSIM) that is not above 0 counts as 0, with gradient 0, where a plain power is
    NaN. Wang et al., "Multiscale structural similarity for image quality assessment", 2003.

    Args:
        {arguments}
        betas: an exponent for each scale, greater than 0; None: the paper's (0.0448, 0.2856, 0.3001, 0.2363, 0.1333).
        reduction: "mean" over the planes that have a window at every scale, "sum", or "none": (N, C).

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or (N, C) for "none".

    Raises:
        TypeError: an image is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, a window larger than the image at the last scale, an even `win_size`, a number
            out of range, devices differ, unknown `padding`, `reduction` or `empty`.

    Example:
        >>> x = torch.linspace(0, 1, 64 * 64).reshape(1, 1, 64, 64)
        >>> safeops.ms_ssim(x, x, win_size=3), safeops.ms_ssim(x, 1 - x, win_size=3)
        (tensor(1.), tensor(0.))
    """
    betas = BETAS if betas is None else betas
    loss_reduction.validate_options(NAME, reduction, empty)
    validate_betas(betas)
    options = data_range, win_size, win_sigma, k1, k2, padding
    validate(NAME, input, target, mask, options, len(betas))
    for key, x in {"input": input, "target": target, "mask": mask}.items():
        if x is not None:
            check.no_dtensor(NAME, key, x)  # torch's own pooling of one has no gradient
    compute = compute_dtype(input.dtype, target.dtype)
    input, target = input.to(compute), target.to(compute)  # the scales' gradients are added wide
    value, exists = 1, True
    for scale, beta in enumerate(betas, 1):
        last = scale == len(betas)
        sums = _ms_ssim.call(input, target, mask, options, PLANES, False, "zero")
        count = sums[2].detach()
        mean = sums[0 if last else 1] / count.clamp(min=1)
        value, exists = value * power(1 - mean, beta), (count > 0) & exists
        if not last:
            keep = None if mask is None else mask.expand(input.shape)
            input, target = halve(input, keep), halve(target, keep)
            mask = None if mask is None else halve_mask(keep)
    nothing = float("nan") if reduction == "none" and empty == "nan" else 0.0
    value = torch.where(exists, value, nothing)
    return loss_reduction.reduce(NAME, value, exists, None, reduction, None, empty).to(compute)

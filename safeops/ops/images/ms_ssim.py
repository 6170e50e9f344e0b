"""ms_ssim: the structural similarity of images at several scales."""

import math

import torch
import torch.nn.functional as F

from safeops.core import check, loss_reduction
from safeops.core.dtypes import LARGEST, compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw, like
from safeops.core.op import Op
from safeops.ops.images._ssim import ARGUMENTS, LARGEST_ON_CUDA, PLANES, StructuralSimilarity, validate

NAME = "ms_ssim"
BETAS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)

# ---- definition


def halve(x, mask):
    """Images of half the size: each pixel is the mean of the kept pixels of a 2 x 2 block (2 x 2 x 2 in volumes)."""
    if 0 in x.shape:  # pooling refuses an empty tensor
        return x[(..., *[slice(None, None, 2)] * (x.dim() - 2))]
    pool = F.avg_pool2d if x.dim() == 4 else F.avg_pool3d
    options = {"kernel_size": 2, "ceil_mode": True, "count_include_pad": False}
    if mask is None:
        return pool(x, **options)
    share = pool(mask.to(x.dtype), **options)
    return pool(torch.where(mask, x, 0), **options) / torch.where(share > 0, share, 1)


def halve_mask(keep):
    """The mask at half the size: a pixel is kept if a pixel of its 2 x 2 block (2 x 2 x 2 in volumes) is kept."""
    if 0 in keep.shape:
        return halve(keep, None)
    pool = F.max_pool2d if keep.dim() == 4 else F.max_pool3d
    return pool(keep.to(torch.float32), kernel_size=2, ceil_mode=True) > 0


def definition(input, target, mask, scales, data_range, win_size, win_sigma, k1, k2, same):
    """(scales, 3, N, C): each plane's sums of 1 - SSIM and of 1 - contrast, and number of windows, at each scale."""
    options = data_range, win_size, win_sigma, k1, k2, "same" if same else "valid"
    compute = compute_dtype(input.dtype, target.dtype)
    input, target = input.to(compute), target.to(compute)  # all scales' gradients are added wide
    sums = []
    for _ in range(scales):
        if sums:
            keep = None if mask is None else mask.expand(input.shape)
            input, target = halve(input, keep), halve(target, keep)
            mask = None if mask is None else halve_mask(keep)
        sums.append(_ms_ssim.call(input, target, mask, options, PLANES, False, "zero"))
    return torch.stack(sums)


def product(x, betas):
    """The product of x^beta over the scales, dim 0. Where an x is 0 or less it is 0, with gradient 0; NaN stays NaN."""
    dead = x <= 0
    base = torch.where(dead, 1, x)
    value = 1
    for scale, beta in zip(base, betas):
        value = value * scale**beta
    return torch.where(dead.any(0), value.detach() * 0, value)


# ---- op


def _sizes(shape, scales):
    """The number of pixels in all scales after the first."""
    total, sides = 0, shape[2:]
    for _ in range(scales - 1):
        sides = [-(-n // 2) for n in sides]
        total += math.prod((*shape[:2], *sides))
    return total


def _fake(input, target, mask, scales, *_):
    pixels, compute = _sizes(input.shape, scales), compute_dtype(input.dtype, target.dtype)
    return (
        input.new_empty((scales, 3, *input.shape[:2]), dtype=torch.float64),
        input.new_empty(2 * pixels, dtype=compute),
        input.new_empty(0 if mask is None else pixels, dtype=torch.bool),
    )


_WINDOW = "int scales, float data_range, int win_size, float win_sigma, float k1, float k2, bool same"
_forward = declare_raw(
    "_ms_ssim",
    f"(Tensor input, Tensor target, Tensor? mask, {_WINDOW}) -> (Tensor sums, Tensor images, Tensor masks)",
    fake=_fake,
)
_backward = declare_raw(
    "_ms_ssim_backward",
    f"(Tensor grad, Tensor input, Tensor target, Tensor? mask, Tensor images, Tensor masks, {_WINDOW}, "
    "bool need_input=True, bool need_target=True) -> (Tensor, Tensor)",
    fake=lambda grad, *rest: tuple(
        like(x, x.shape, x.dtype) if need else x.new_empty(0) for x, need in zip(rest[:2], rest[-2:])
    ),
)

# ---- record


class Scales(Op):
    """The record of the sums of all scales. Its CUDA kernels compute each smaller image while they read the larger one,
    and save it for backward. On the CPU, and for volumes, the definition runs, which calls the kernels of ssim.

    It has the function's name, so that errors name the function; the function's record stays in the registry."""

    owner, differentiable, compiled = "C++/CUDA", ("input", "target"), ("cuda",)

    def prepare(self, input, target, mask, scales, window):
        takes = input.dim() == 4 and window[1] <= LARGEST_ON_CUDA[4]
        return takes, (input, target, mask, scales, *window)

    def validate(self, *arguments):
        """Nothing to do: the public function has validated its arguments."""

    def composite(self, *operands):
        return self.definition(*operands)  # the ops that it calls accept symbolic numbers

    def gradients(self, grad, needs, operands, results):
        return self.backward(grad, *operands[:3], *results, *operands[3:], *needs[:2])


_scales = Scales(NAME, _forward, _backward, definition)
_ms_ssim = StructuralSimilarity(NAME)

# ---- public function


def validate_betas(betas):
    if not isinstance(betas, (tuple, list)):
        raise TypeError(f"{NAME}: betas must be a tuple of numbers, got {type(betas).__name__}")
    if not betas:
        raise ValueError(f"{NAME}: betas must have a number for each scale, got {betas!r}")
    for beta in betas:
        check.number(NAME, "betas", beta, above=0, maximum=LARGEST)


@_ms_ssim.public(
    "(Tensor input, Tensor target, *, Tensor? mask=None, float data_range=1.0, int win_size=11, float win_sigma=1.5, "
    'float k1=0.01, float k2=0.03, str padding="valid", float[]? betas=None, str reduction="mean", str empty="zero") '
    "-> Tensor",
    arguments=ARGUMENTS,
)
def ms_ssim(
    input, target, *extra, mask=None, data_range=1.0, win_size=11, win_sigma=1.5, k1=0.01, k2=0.03, padding="valid",
    betas=None, reduction="mean", empty="zero", **unknown,
):  # fmt: skip
    """Multi-scale SSIM: the product over the scales of contrast^beta, at the last scale of SSIM^beta, for each plane.

    Each pixel of a scale is the mean of the kept ones of 2 x 2 pixels of the scale before, of fewer at an odd border. A
    contrast (at the last scale an SSIM) of 0 or less counts as 0, with gradient 0, where a plain power is NaN. Wang et
    al., "Multiscale structural similarity for image quality assessment", 2003.

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
    if extra or unknown:
        refuse(ms_ssim, extra, unknown)
    betas = BETAS if betas is None else betas
    loss_reduction.validate_options(NAME, reduction, empty)
    validate_betas(betas)
    options = data_range, win_size, win_sigma, k1, k2, padding
    validate(NAME, input, target, mask, options, len(betas))
    for key, x in {"input": input, "target": target, "mask": mask}.items():
        if x is not None:
            check.no_dtensor(NAME, key, x)  # torch's pooling of a DTensor has no gradient
    compute = compute_dtype(input.dtype, target.dtype)
    sums = _scales.call(input, target, mask, len(betas), (data_range, win_size, win_sigma, k1, k2, padding == "same"))
    count = sums[:, 2].detach()
    losses = torch.cat((sums[:-1, 1], sums[-1:, 0]))  # 1 - contrast; at the last scale 1 - SSIM
    value, exists = product(1 - losses / count.clamp(min=1), betas), (count > 0).all(0)
    nothing = float("nan") if reduction == "none" and empty == "nan" else 0.0
    value = torch.where(exists, value, nothing)
    return loss_reduction.reduce(NAME, value, exists, None, reduction, None, empty).to(compute)

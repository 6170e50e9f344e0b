"""ms_ssim: the contrast of each scale, and the SSIM of the last."""

import torch
import torch.nn.functional as F

from safeops.testing import Bad, Sample
from tests.ops.bad_calls import NAN
from tests.ops.images.image import CALL, OF_WHOLE, keep_of, pair, record, reduced
from tests.ops.images.similarity import OPTIONS, WINDOWS, bad_windows, maps, sizes
from tests.ops.operands import mask

BETAS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)


def _halve(x, keep):
    """Returns (mean of the kept pixels in each 2 x 2 cell, or 0; bool: the cell has kept pixels). Pads odd sizes."""
    pad = [k for n in reversed(x.shape[2:]) for k in (0, n % 2)]
    keep, x = F.pad(keep, pad), F.pad(torch.where(keep, x, 0), pad)

    def cells(t):
        for d in range(2, t.dim()):
            t = t.unflatten(d, (-1, 2)).movedim(d + 1, -1)
        return t.flatten(x.dim())

    total, count = cells(x).sum(-1), cells(keep).sum(-1)
    return total / count.clamp(min=1), count > 0


def _scales(input, target, mask, betas, options):
    keep = keep_of(input, mask)
    for scale, beta in enumerate(betas, 1):
        yield input, target, keep, beta, maps(input, target, keep, **OPTIONS | options), scale == len(betas)
        (input, next_keep), (target, _) = _halve(input, keep), _halve(target, keep)
        keep = next_keep


def _ms_ssim(input, target, *, mask=None, betas=BETAS, reduction="mean", empty="zero", **options):
    value, exists = 1, True
    for _, _, _, beta, (ssim, contrast, counted), last in _scales(input, target, mask, betas, options):
        dims = tuple(range(2, input.dim()))
        count = counted.sum(dims)
        mean = (ssim if last else contrast).sum(dims) / count.clamp(min=1)
        dead = mean <= 0
        value, exists = value * torch.where(dead, 0, torch.where(dead, 1, mean) ** beta), exists & (count > 0)
    value = torch.where(exists, value, NAN if reduction == "none" and empty == "nan" else 0.0)
    return reduced(value, exists, reduction, None, empty)


def _ms_terms(sample, outcome):
    """Sizes of the terms that cancel: the sum over the scales of a scale's largest. Means of 2 x 2 pixels enlarge no
    slope."""
    x, y = sample.args
    options = {k: v for k, v in sample.kwargs.items() if k in OPTIONS}
    upstream = outcome.upstream[0] if outcome.upstream else torch.ones(())
    largest = upstream.nan_to_num(0, 0, 0).abs().max()
    value = gradient = 0.0
    scales = _scales(x, y, sample.kwargs.get("mask"), sample.kwargs.get("betas", BETAS), options)
    for a, b, keep, beta, (ssim, contrast, counted), last in scales:
        dims = tuple(range(2, x.dim()))
        count = counted.sum(dims, keepdim=True).clamp(min=1)
        mean = ((ssim if last else contrast).sum(dims, keepdim=True) / count).abs().clamp(min=1e-3)
        slope = beta / mean / count * torch.ones_like(ssim)
        size, spread = sizes(a, b, keep, slope, **OPTIONS | options)
        relative = ((beta / mean) * size.sum(dims, keepdim=True) / count).max()
        value, gradient = value + relative, gradient + spread.max() * (1 + relative)
    planes = x.shape[0] * x.shape[1] if sample.kwargs.get("reduction") == "sum" else 1
    return float(value) * planes, dict.fromkeys((0, 1), gradient * largest)


def _ms_samples():
    options = {"win_size": 3, "win_sigma": 1.0, "betas": (0.4, 0.6)}
    yield Sample(pair(2, 2, 6, 7, seed=1), {"mask": mask(2, 1, 6, 7, keep=0.9), **options}, name="masked")
    yield Sample(pair(2, 2, 6, 8, seed=3), {"reduction": "none", **options}, name="none")
    same = {"padding": "same", "reduction": "sum", "data_range": 2.0, **options}
    masked = {"mask": mask(2, 1, 5, 7, seed=3), **same}
    yield Sample(pair(2, 3, 5, 7, seed=5), masked, name="sum, masked, odd sizes", slow=True)
    volumes = {"padding": "same", **options, "betas": (0.2, 0.3, 0.5)}
    yield Sample(pair(2, 1, 3, 4, 5, seed=7), volumes, name="volumes")


def _bad_scales():
    x = torch.zeros(2, 3, 176, 176)
    yield from bad_windows("ms_ssim", 176)
    short = x[..., :160]
    yield Bad(
        (short, short), {}, ValueError, ("ms_ssim", "win_size 11", "scale 5", "divided by 16", "(2, 3, 176, 160)")
    )
    yield Bad((x, x), {"betas": ()}, ValueError, ("ms_ssim", "betas", "()"))
    yield Bad((x, x), {"betas": 0.5}, TypeError, ("ms_ssim", "betas", "float"))
    yield Bad((x, x), {"betas": (0.5, 0.0)}, ValueError, ("ms_ssim", "betas", "0.0"))
    yield Bad((x, x), {"betas": (0.5, "1")}, TypeError, ("ms_ssim", "betas", "str"))


record(
    "ms_ssim",
    _ms_ssim,
    _ms_samples(),
    _bad_scales(),
    CALL | WINDOWS | {"betas": (0.5, 0.5)},
    gpu="its kernel is that of ssim, with torch's pooling between: tests/gpu/test_values.py",
    data=(0, 1),
    terms=_ms_terms,
    skip={
        **OF_WHOLE,
        "accumulation": "the sums are those of ssim, which has it",
        "inductor": "torch 2.13's fails on the strides of what is half of symbolic sizes; ssim has it",
    },
)

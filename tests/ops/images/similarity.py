"""ssim and ssim_loss, from the moments E[x], E[y], E[x^2], E[y^2], E[xy] of each window."""

import functools
import math

import torch
import torch.nn.functional as F

import safeops
from safeops.testing import Bad, Sample
from tests.ops.bad_calls import NAN, must
from tests.ops.gpu import Case, numbers
from tests.ops.gpu import keep as kept
from tests.ops.images.image import CALL, NO_ROUTE, bad_images, keep_of, pair, record, reduced
from tests.ops.operands import HUGE, mask


def _window(size, sigma, spatial, like):
    x = torch.arange(size, dtype=like.dtype, device=like.device) - size // 2
    w = torch.exp(-((x / sigma) ** 2) / 2)
    w, window = w / w.sum(), 1
    for d in range(spatial):
        window = window * w.reshape([-1 if i == d else 1 for i in range(spatial)])
    return window


def _windows(keep, win_size, win_sigma, padding, like):
    """Returns (bool: the window counts, bool: a window that counts sees the pixel, mean: x -> its weighted mean in each
    window, or 0)."""
    spatial = keep.dim() - 2
    conv, back = (F.conv2d, F.conv_transpose2d) if spatial == 2 else (F.conv3d, F.conv_transpose3d)
    around, half = win_size // 2 if padding == "same" else 0, win_size // 2
    inner = [slice(half, n - half) for n in keep.shape[2:]] if padding == "valid" else [...]
    counted = keep[(slice(None), slice(None), *inner)] if padding == "valid" else keep

    def planes(x):
        return x.reshape(-1, 1, *x.shape[2:])

    ones = torch.ones(1, 1, *[win_size] * spatial, dtype=like.dtype, device=keep.device)
    seen = keep & (back(planes(counted.to(like.dtype)), ones, padding=around) > 0.5).reshape(keep.shape)
    w = _window(win_size, win_sigma, spatial, like)[None, None]

    def total(x):
        return conv(planes(x), w, padding=around).reshape(counted.shape)

    share = total(seen.to(like.dtype))

    def mean(x):
        return torch.where(counted, total(torch.where(seen, x, 0)), 0) / torch.where(counted, share, 1)

    return counted, seen, mean


OPTIONS = {"data_range": 1.0, "win_size": 11, "win_sigma": 1.5, "k1": 0.01, "k2": 0.03, "padding": "valid"}


def _of(mx, my, xx, yy, xy, c1, c2):
    """Returns (SSIM, contrast), computed from the moments."""
    contrast = (2 * (xy - mx * my) + c2) / (xx - mx * mx + yy - my * my + c2)
    return contrast * (2 * mx * my + c1) / (mx * mx + my * my + c1), contrast


def maps(x, y, keep, data_range, win_size, win_sigma, k1, k2, padding):
    """Returns (SSIM, contrast, bool: the window counts) per window."""
    counted, _, mean = _windows(keep, win_size, win_sigma, padding, x)
    x, y = torch.where(keep, x, 0), torch.where(keep, y, 0)
    moments = [mean(t) for t in (x, y, x * x, y * y, x * y)]
    ssim, contrast = _of(*moments, (k1 * data_range) ** 2, (k2 * data_range) ** 2)
    return torch.where(counted, ssim, 0), torch.where(counted, contrast, 0), counted


def _similarity(loss):
    def definition(input, target, *, mask=None, reduction="mean", denominator=None, empty="zero", **options):
        ssim, _, counted = maps(input, target, keep_of(input, mask), **OPTIONS | options)
        terms = torch.where(counted, 1 - ssim, 0) if loss else ssim
        return reduced(terms, counted, reduction, denominator, empty)

    definition.__module__ = __name__
    return definition


def sizes(x, y, keep, upstream, data_range, win_size, win_sigma, k1, k2, padding):
    """Returns the sizes of the terms that cancel in each window's value and in each pixel's gradient.

    upstream: the gradient of each window. r: the range of a plane's values. (1) Relative to a level within the range,
    first moments are at most r and second moments at most r^2, so a variance has the rounding of three terms of r^2.
    (2) This error changes a value by the value's slope times the error, and a slope in proportion to itself.
    """
    counted, seen, mean = _windows(keep, win_size, win_sigma, padding, x)
    scaled = [torch.where(seen & t.isfinite(), t, 0) / data_range for t in (x, y)]
    ranges = [(torch.where(seen, t, -1e300).amax() - torch.where(seen, t, 1e300).amin()).clamp(min=0) for t in scaled]
    r = sum(t.nan_to_num(0, 0, 0) for t in ranges)
    (x, y), s, d = scaled, scaled[0] + scaled[1], scaled[0] - scaled[1]
    ms, md = mean(s), mean(d)
    vs, vd = (mean(t * t) - m * m for t, m in ((s, ms), (d, md)))
    b1, b2 = ms * ms + md * md + 2 * k1 * k1, (vs + vd).clamp(min=0) + 2 * k2 * k2
    by_mean = (4 * ms.abs() * md * md + 4 * md.abs() * (ms * ms + 2 * k1 * k1)) / (b1 * b1)
    by_variance = (2 * vd.abs() + 2 * vs.abs() + 4 * k2 * k2) / (b2 * b2)
    first, third = r + ms.abs() + md.abs(), 3 * r * r
    value = 2 + by_mean * first + 2 * by_variance * third
    relative = 1 + 4 * third / b2 + 4 * first * (ms.abs() + md.abs()) / b1
    slope = upstream.abs() * (by_mean + 4 * r * by_variance) * relative
    leaf = torch.zeros_like(x).requires_grad_()
    with torch.enable_grad():
        (spread,) = torch.autograd.grad(mean(leaf), leaf, torch.where(counted, slope, 0))
    return torch.where(counted, value, 0), 4 * spread / data_range


def _terms(sample, outcome):
    x, y = sample.args
    parameters = {k: v for k, v in sample.kwargs.items() if k in OPTIONS}
    keep, how = keep_of(x, sample.kwargs.get("mask")), sample.kwargs.get("reduction", "mean")
    _, _, counted = maps(x, y, keep, **OPTIONS | parameters)
    leaf = torch.zeros(counted.shape, dtype=x.dtype, device=x.device).requires_grad_()
    value = reduced(leaf, counted, how, sample.kwargs.get("denominator"), "zero")
    upstream = outcome.upstream[0] if outcome.upstream else torch.ones_like(value)
    (per_window,) = torch.autograd.grad(value, leaf, upstream.nan_to_num(0, 0, 0))
    size, gradient = sizes(x, y, keep, per_window, **OPTIONS | parameters)
    per = reduced(size, counted, how, sample.kwargs.get("denominator"), "zero")
    return per.nan_to_num(0, 0, 0).abs(), {0: gradient, 1: gradient}


def _plain(definition):
    """Returns the formula as users write it: in the images' own dtype, without a mask."""

    @functools.wraps(definition)
    def twin(input, target, *, mask=None, **options):
        if mask is not None:
            raise TypeError("it has no such argument")
        return definition(input, target, **options)

    return twin


SMALL = {"win_size": 3, "win_sigma": 1.0}


def _samples(denominator):
    pixels = mask(2, 1, 5, 6)
    yield Sample(pair(2, 2, 5, 6, seed=1), {"mask": pixels, **SMALL}, name="mean, masked")
    # The compiled sample (slow=True) has padding "same": in torch 2.13 Inductor fails on strides (H - 2) (W - 2).
    most = torch.ones(2, 1, 4, 5, dtype=torch.bool)  # windows of few pixels would have noise as variance
    most[0, 0, 1, 2] = most[1, 0, :, 0] = False
    options = {"mask": most, "padding": "same", "k2": 0.2, **SMALL}
    yield Sample(pair(2, 3, 4, 5, seed=15), options, name="mean, masked, same", slow=True)
    # k2=0.2 bounds the gradients of windows of two pixels: routes are compared relative to the largest gradient.
    options = {"mask": mask(2, 2, 5, 6, seed=1), "padding": "same", "reduction": "none", "k2": 0.2, **SMALL}
    yield Sample(pair(2, 2, 5, 6, seed=3), options, name="none, masked, same")
    yield Sample(pair(2, 2, 5, 6, seed=5), {"reduction": "none", **SMALL}, name="none")
    options = {"reduction": "sum", "padding": "same", "data_range": 2.5, "k1": 0.2, "k2": 0.1, **SMALL}
    yield Sample(pair(2, 1, 4, 6, seed=7), options, name="sum, same, other constants")
    yield Sample(pair(2, 1, 7, 6, seed=9), {"win_size": 5, "padding": "same"}, name="a larger window, same")
    options = {"mask": mask(2, 1, 3, 4, 5, seed=2), **SMALL}
    yield Sample(pair(2, 1, 3, 4, 5, seed=11), options, name="volumes, masked")
    if denominator:
        count = torch.tensor(7.5, dtype=torch.float64)
        yield Sample(
            pair(2, 1, 5, 5, seed=13), {"denominator": count, **SMALL}, name="denominator", differentiable=(0, 1)
        )


def bad_windows(name, size=12):
    yield from bad_images(name, size)
    x = torch.zeros(2, 3, size, size)
    yield Bad((x[0], x[0]), {}, ValueError, (name, "input", "(N, C, H, W)", f"(3, {size}, {size})"))
    short = x[..., :10]
    yield Bad((short, short), {}, ValueError, (name, "win_size 11", "larger than the image", f"(2, 3, {size}, 10)"))
    for value in (0, -3, 4):
        yield Bad((x, x), {"win_size": value}, ValueError, (name, "win_size", "odd", str(value)))
    for value in (3.0, True, None):
        yield Bad((x, x), {"win_size": value}, TypeError, (name, "win_size", "int", type(value).__name__))
    for key in ("win_sigma", "k1", "k2"):
        for value in (0.0, -1.0, NAN):
            yield Bad((x, x), {key: value}, ValueError, (name, key, str(value)))
        yield Bad((x, x), {key: "1"}, TypeError, (name, key, "str"))
        yield must(name, key, (x, x), {key: HUGE}, ValueError)
    yield Bad((x, x), {"padding": "reflect"}, ValueError, (name, "padding", "reflect", "valid"))


def _bad_denominators(name):
    x = torch.zeros(2, 3, 12, 12)
    yield Bad((x, x), {"denominator": torch.ones(2)}, ValueError, (name, "denominator", "(2,)"))
    yield Bad((x, x), {"denominator": "count"}, TypeError, (name, "denominator", "str"))
    yield Bad((x, x), {"denominator": True}, TypeError, (name, "denominator", "denominator must be a number"))
    yield must(name, "denominator", (x, x), {"denominator": HUGE}, ValueError)
    yield Bad((x, x), {"denominator": 4.0, "reduction": "sum"}, ValueError, (name, "denominator", "sum"))


WINDOWS = {"data_range": 1.5, "win_size": 3, "win_sigma": 1.25, "k1": 0.02, "k2": 0.5, "padding": "same"}


def _map_case(name, masked):
    """Returns a maker of GPU calls: the map of two images of about n pixels. (tests/gpu/test_values.py has sums.)"""

    def make(n, dtype, seed):
        rows = math.isqrt(n)
        sides = 1, 1, rows, n // rows
        mask = kept(math.prod(sides), seed).reshape(sides) if masked else None

        def call(*leaves):
            pair = [x.reshape(sides) for x in leaves]
            return getattr(safeops, name)(*pair, mask=mask, data_range=4.0, padding="same", reduction="none")

        return Case(call, (numbers(math.prod(sides), dtype, seed), numbers(math.prod(sides), dtype, seed + 50)))

    return make


for _name, _loss in (("ssim", False), ("ssim_loss", True)):
    _of_loss = {"denominator": torch.tensor(5.0)} if _loss else {}
    _formula = _similarity(_loss)
    record(
        _name,
        _formula,
        _samples(_loss),
        [*bad_windows(_name), *(_bad_denominators(_name) if _loss else ())],
        CALL | _of_loss | WINDOWS,
        gpu=_map_case(_name, masked=_loss),
        no_route=NO_ROUTE if _loss else None,  # an op of torch divides by the denominator
        data=(0, 1),
        torch_equivalent=_plain(_formula),
        terms=_terms,
        skip={"accumulation": "the sums are those of ssim, which has it"} if _loss else {},
    )

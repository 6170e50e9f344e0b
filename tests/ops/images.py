"""The functions of images: the SSIM family by the textbook's five moments, and what is made of other ops."""

import functools
import math

import torch
import torch.nn.functional as F

import safeops
from safeops.testing import Bad, Sample
from tests.ops.bad_calls import NAN, must
from tests.ops.gpu import Case, numbers
from tests.ops.gpu import keep as kept
from tests.ops.operands import HUGE, data, mask
from tests.ops.record import NOT_SAFE, Record

NO_GPU = "no kernel on CUDA: plain torch operations run there, which tests of kernels tell nothing about"
HERE = "tests/contract/images/test_images.py"
NO_ROUTE = f"what is made of its kernel's sums are a few aten operations more: {HERE} watches it"
OF_IMAGES = {
    "weight_zero": "has no weight",
    "sizes": f"an image has at least four dims, and a window fits in: {HERE} has other sizes",
    "saved_bytes": f"a few numbers of each plane are saved: {HERE} counts",
    "peak_memory": f"a few numbers of each plane are made: {HERE} counts, where pixels are many",
}

OF_WHOLE = {"masked_upstream": "a result is of a whole image: what is masked out has no upstream gradient of its own"}

# ---- the SSIM family


def _window(size, sigma, spatial, like):
    x = torch.arange(size, dtype=like.dtype, device=like.device) - size // 2
    w = torch.exp(-((x / sigma) ** 2) / 2)
    w, whole = w / w.sum(), 1
    for d in range(spatial):
        whole = whole * w.reshape([-1 if i == d else 1 for i in range(spatial)])
    return whole


def _windows(keep, win_size, win_sigma, padding, like):
    """(which windows count, which pixels one of them sees, their weighted means, which are 0 where none counts)"""
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
    """(SSIM, its contrast) of the moments."""
    contrast = (2 * (xy - mx * my) + c2) / (xx - mx * mx + yy - my * my + c2)
    return contrast * (2 * mx * my + c1) / (mx * mx + my * my + c1), contrast


def _maps(x, y, keep, data_range, win_size, win_sigma, k1, k2, padding):
    """(SSIM, contrast, which windows count)"""
    counted, _, mean = _windows(keep, win_size, win_sigma, padding, x)
    x, y = torch.where(keep, x, 0), torch.where(keep, y, 0)
    moments = [mean(t) for t in (x, y, x * x, y * y, x * y)]
    ssim, contrast = _of(*moments, (k1 * data_range) ** 2, (k2 * data_range) ** 2)
    return torch.where(counted, ssim, 0), torch.where(counted, contrast, 0), counted


def _keep(x, mask):
    keep = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    return keep if mask is None else keep & mask


def _reduce(terms, counted, reduction, denominator, empty):
    if reduction == "none":
        return terms
    count = counted.sum()
    divisor = 1 if reduction == "sum" else count if denominator is None else denominator
    value = terms.sum() / torch.where(count > 0, divisor, 1)
    return torch.where(count > 0, value, NAN if empty == "nan" else 0.0)


def _similarity(loss):
    def definition(input, target, *, mask=None, reduction="mean", denominator=None, empty="zero", **options):
        ssim, _, counted = _maps(input, target, _keep(input, mask), **OPTIONS | options)
        terms = torch.where(counted, 1 - ssim, 0) if loss else ssim
        return _reduce(terms, counted, reduction, denominator, empty)

    definition.__module__ = __name__
    return definition


def _sizes(x, y, keep, upstream, data_range, win_size, win_sigma, k1, k2, padding):
    """Sizes of what the value of each window, and the gradient at each pixel, is made of.

    The moments are taken about a level within each plane's values, so that first ones are at most r, their range, and
    second ones r^2; rounding a variance is rounding three terms of r^2. A value moves by its slopes times that, and a
    slope by its own relative slope. upstream: the gradient of each window.
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
    given = {k: v for k, v in sample.kwargs.items() if k in OPTIONS}
    keep, how = _keep(x, sample.kwargs.get("mask")), sample.kwargs.get("reduction", "mean")
    _, _, counted = _maps(x, y, keep, **OPTIONS | given)
    leaf = torch.zeros(counted.shape, dtype=x.dtype, device=x.device).requires_grad_()
    value = _reduce(leaf, counted, how, sample.kwargs.get("denominator"), "zero")
    upstream = outcome.upstream[0] if outcome.upstream else torch.ones_like(value)
    (per_window,) = torch.autograd.grad(value, leaf, upstream.nan_to_num(0, 0, 0))
    size, gradient = _sizes(x, y, keep, per_window, **OPTIONS | given)
    per = _reduce(size, counted, how, sample.kwargs.get("denominator"), "zero")
    return per.nan_to_num(0, 0, 0).abs(), {0: gradient, 1: gradient}


def _plain(definition):
    """As users write it: in the images' own dtype, with no mask."""

    @functools.wraps(definition)
    def twin(input, target, *, mask=None, **options):
        if mask is not None:
            raise TypeError("it has no such argument")
        return definition(input, target, **options)

    return twin


def _images(*shape, seed):
    return data(*shape, seed=seed, low=0.0, high=1.0)


def _pair(*shape, seed):
    x = _images(*shape, seed=seed)
    return x, (x + data(*shape, seed=seed + 1, low=-0.3, high=0.3))


SMALL = {"win_size": 3, "win_sigma": 1.0}


def _samples(denominator):
    pixels = mask(2, 1, 5, 6)
    yield Sample(_pair(2, 2, 5, 6, seed=1), {"mask": pixels, **SMALL}, name="mean, masked")
    # (compiled: Inductor's sympy, in torch 2.13, fails on strides of (H - 2) (W - 2) where H and W are symbols)
    most = torch.ones(2, 1, 4, 5, dtype=torch.bool)  # no window is left with a pixel or two, whose variance is rounding
    most[0, 0, 1, 2] = most[1, 0, :, 0] = False
    options = {"mask": most, "padding": "same", "k2": 0.2, **SMALL}
    yield Sample(_pair(2, 3, 4, 5, seed=15), options, name="mean, masked, same", slow=True)
    # (a larger constant: routes are held to what the largest gradient allows, and here windows have two pixels)
    options = {"mask": mask(2, 2, 5, 6, seed=1), "padding": "same", "reduction": "none", "k2": 0.2, **SMALL}
    yield Sample(_pair(2, 2, 5, 6, seed=3), options, name="none, masked, same")
    yield Sample(_pair(2, 2, 5, 6, seed=5), {"reduction": "none", **SMALL}, name="none")
    options = {"reduction": "sum", "padding": "same", "data_range": 2.5, "k1": 0.2, "k2": 0.1, **SMALL}
    yield Sample(_pair(2, 1, 4, 6, seed=7), options, name="sum, same, other constants")
    yield Sample(_pair(2, 1, 7, 6, seed=9), {"win_size": 5, "padding": "same"}, name="a larger window, same")
    options = {"mask": mask(2, 1, 3, 4, 5, seed=2), **SMALL}
    yield Sample(_pair(2, 1, 3, 4, 5, seed=11), options, name="volumes, masked")
    if denominator:
        count = torch.tensor(7.5, dtype=torch.float64)
        yield Sample(
            _pair(2, 1, 5, 5, seed=13), {"denominator": count, **SMALL}, name="denominator", differentiable=(0, 1)
        )


def _bad_images(name, size=12):
    """Of two images, whatever is made of them."""
    x = torch.zeros(2, 3, size, size)
    yield Bad((None, x), {}, TypeError, (name, "input", "tensor", "NoneType"))
    yield Bad((x, 1.0), {}, TypeError, (name, "target", "tensor", "float"))
    yield Bad((x.long(), x), {}, TypeError, (name, "input", "floating", "torch.int64"))
    yield Bad((x, x.bool()), {}, TypeError, (name, "target", "floating", "torch.bool"))
    yield Bad((x, x[:1]), {}, ValueError, (name, "target", f"(1, 3, {size}, {size})", f"(2, 3, {size}, {size})"))
    yield Bad((x, x.to("meta")), {}, ValueError, (name, "target", "meta"))
    for value in (0.0, -1.0, NAN):
        yield Bad((x, x), {"data_range": value}, ValueError, (name, "data_range", str(value)))
    yield Bad((x, x), {"data_range": "1"}, TypeError, (name, "data_range", "str"))
    yield Bad((x, x), {"data_range": None}, TypeError, (name, "data_range", "NoneType"))
    yield must(name, "data_range", (x, x), {"data_range": HUGE}, ValueError)
    yield from _bad_options(name, (x, x))


def _bad_options(name, good):
    """What every function of images refuses of its mask and its reduction."""
    shape = tuple(good[0].shape)
    keep = torch.ones(shape, dtype=torch.bool)
    yield Bad(good, {"mask": torch.ones(shape)}, TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad(good, {"mask": [True]}, TypeError, (name, "mask", "tensor", "list"))
    yield Bad(good, {"mask": keep[:, :2]}, ValueError, (name, "mask", str((2, 2, *shape[2:])), str(shape), "broadcast"))
    yield Bad(good, {"mask": keep[None]}, ValueError, (name, "mask", str((1, *shape)), str(shape)))
    yield Bad(good, {"mask": keep.to("meta")}, ValueError, (name, "mask", "meta"))
    yield Bad(good, {"reduction": "average"}, ValueError, (name, "reduction", "average", "mean"))
    yield Bad(good, {"empty": "skip"}, ValueError, (name, "empty", "skip", "zero"))
    yield Bad(good, {"mask": ~keep, "empty": "raise"}, ValueError, (name, "empty", "raise"))


def _bad_windows(name, size=12):
    yield from _bad_images(name, size)
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


def _plain_images(seed):
    return _images(2, 1, 12, 13, seed=seed).float()


CALL = {"input": _plain_images(1), "target": _plain_images(2), "mask": torch.arange(13) % 5 != 2}
WINDOWS = {"data_range": 1.5, "win_size": 3, "win_sigma": 1.25, "k1": 0.02, "k2": 0.5, "padding": "same"}


def _record(name, definition, samples, bad_calls, call, gpu=NO_GPU, **fields):
    skip = NOT_SAFE | OF_IMAGES | fields.pop("skip", {})
    Record(name, definition, samples, bad_calls=bad_calls, call=call, gpu=gpu, no_route=NO_ROUTE, skip=skip, **fields)


def _map_case(name, masked):
    """The map of two images of about n pixels, whose leaves are vectors. (Of the sums: tests/gpu/test_values.py.)"""

    def make(n, dtype, seed):
        rows = math.isqrt(n)
        sides = 1, 1, rows, n // rows
        mask = kept(math.prod(sides), seed).reshape(sides) if masked else None

        def call(*leaves):
            pair = [x.reshape(sides) for x in leaves]
            return getattr(safeops, name)(*pair, mask=mask, data_range=4.0, padding="same", reduction="none")

        return Case(call, (numbers(math.prod(sides), dtype, seed), numbers(math.prod(sides), dtype, seed + 50)))

    return make


# (launches: ssim is 1 - what the kernel gives, by torch)
for _name, _loss, _launches in (("ssim", False, ((2, 0), (2, 0))), ("ssim_loss", True, ((1, 0), (1, 0)))):
    _of_loss = {"denominator": torch.tensor(5.0)} if _loss else {}
    _formula = _similarity(_loss)
    _record(
        _name,
        _formula,
        _samples(_loss),
        [*_bad_windows(_name), *(_bad_denominators(_name) if _loss else ())],
        CALL | _of_loss | WINDOWS,
        gpu=_map_case(_name, masked=_loss),
        launches=_launches,
        data=(0, 1),
        torch_equivalent=_plain(_formula),
        terms=_terms,
    )

# ---- ms_ssim

BETAS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)


def _halve(x, keep):
    """2 x 2 means of what is kept, by an odd border of what there is; 0 where that is nothing."""
    pad = [k for n in reversed(x.shape[2:]) for k in (0, n % 2)]
    keep, x = F.pad(keep, pad), F.pad(torch.where(keep, x, 0), pad)

    def cells(t):
        for d in range(2, t.dim()):
            t = t.unflatten(d, (-1, 2)).movedim(d + 1, -1)
        return t.flatten(x.dim())

    total, count = cells(x).sum(-1), cells(keep).sum(-1)
    return total / count.clamp(min=1), count > 0


def _scales(input, target, mask, betas, options):
    keep = _keep(input, mask)
    for scale, beta in enumerate(betas, 1):
        yield input, target, keep, beta, _maps(input, target, keep, **OPTIONS | options), scale == len(betas)
        (input, some), (target, _) = _halve(input, keep), _halve(target, keep)
        keep = some


def _ms_ssim(input, target, *, mask=None, betas=BETAS, reduction="mean", empty="zero", **options):
    value, exists = 1, True
    for _, _, _, beta, (ssim, contrast, counted), last in _scales(input, target, mask, betas, options):
        dims = tuple(range(2, input.dim()))
        count = counted.sum(dims)
        mean = (ssim if last else contrast).sum(dims) / count.clamp(min=1)
        dead = mean <= 0
        value, exists = value * torch.where(dead, 0, torch.where(dead, 1, mean) ** beta), exists & (count > 0)
    value = torch.where(exists, value, NAN if reduction == "none" and empty == "nan" else 0.0)
    return _reduce(value, exists, reduction, None, empty)


def _ms_terms(sample, outcome):
    """The largest of what each scale adds; a scale's slopes by a pixel of the image are at most those by its own."""
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
        size, spread = _sizes(a, b, keep, slope, **OPTIONS | options)
        relative = ((beta / mean) * size.sum(dims, keepdim=True) / count).max()
        value, gradient = value + relative, gradient + spread.max() * (1 + relative)
    planes = x.shape[0] * x.shape[1] if sample.kwargs.get("reduction") == "sum" else 1
    return float(value) * planes, dict.fromkeys((0, 1), gradient * largest)


def _ms_samples():
    options = {"win_size": 3, "win_sigma": 1.0, "betas": (0.4, 0.6)}
    yield Sample(_pair(2, 2, 6, 7, seed=1), {"mask": mask(2, 1, 6, 7, keep=0.9), **options}, name="masked")
    yield Sample(_pair(2, 2, 6, 8, seed=3), {"reduction": "none", **options}, name="none")
    same = {"padding": "same", "reduction": "sum", "data_range": 2.0, **options, "betas": (0.2, 0.3, 0.5)}
    masked = {"mask": mask(2, 1, 5, 7, seed=3), **same}
    yield Sample(_pair(2, 3, 5, 7, seed=5), masked, name="sum, masked, odd sizes", slow=True)
    volumes = {"padding": "same", **options}
    yield Sample(_pair(2, 1, 3, 4, 5, seed=7), volumes, name="volumes")


def _bad_scales():
    x = torch.zeros(2, 3, 176, 176)
    yield from _bad_windows("ms_ssim", 176)
    short = x[..., :160]
    yield Bad(
        (short, short), {}, ValueError, ("ms_ssim", "win_size 11", "scale 5", "divided by 16", "(2, 3, 176, 160)")
    )
    yield Bad((x, x), {"betas": ()}, ValueError, ("ms_ssim", "betas", "()"))
    yield Bad((x, x), {"betas": 0.5}, TypeError, ("ms_ssim", "betas", "float"))
    yield Bad((x, x), {"betas": (0.5, 0.0)}, ValueError, ("ms_ssim", "betas", "0.0"))
    yield Bad((x, x), {"betas": (0.5, "1")}, TypeError, ("ms_ssim", "betas", "str"))


_record(
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

# ---- psnr, total_variation


def _by_image(values, exists, reduction, empty):
    values = torch.where(exists, values, NAN if reduction == "none" and empty == "nan" else 0.0)
    return _reduce(values, exists, reduction, None, empty)


def _psnr(input, target, *, mask=None, data_range=1.0, reduction="mean", empty="zero"):
    keep = _keep(input, mask).flatten(1)
    count = keep.sum(1)
    error = torch.where(keep, (input - target).flatten(1), 0).square().sum(1) / count.clamp(min=1)
    equal = error == 0
    value = -10 * torch.log10(torch.where(equal, 1, error) / data_range**2)
    return _by_image(torch.where(equal, math.inf, value), count > 0, reduction, empty)


def _image_samples(*operands, **options):
    """operands: seed -> one each"""

    def sample(seed, *shape, name, slow=False, **given):
        return Sample(
            tuple(f(*shape, seed=seed + i) for i, f in enumerate(operands)), given | options, name=name, slow=slow
        )

    # (no two sizes are equal, which a trace would take for one)
    yield sample(1, 2, 3, 5, 6, mask=mask(2, 1, 5, 6), name="masked", slow=True)
    yield sample(3, 3, 2, 4, 5, reduction="none", mask=mask(3, 2, 4, 5, seed=1), name="none")
    yield sample(5, 2, 1, 3, 4, 5, reduction="sum", name="volumes, sum")


_record(
    "psnr",
    _psnr,
    _image_samples(_images, _images, data_range=2.5),
    [
        *_bad_images("psnr"),
        Bad((torch.ones(()), torch.ones(())), {}, ValueError, ("psnr", "input", "(N, ...)", "()")),
    ],
    CALL | {"data_range": 1.5},
    data=(0, 1),
    skip={"accumulation": "a logarithm's error is absolute: masked_rms, which it is made of, has it", **OF_WHOLE},
)


def _total_variation(input, *, mask=None, reduction="mean", empty="zero"):
    keep, total = _keep(input, mask), 0
    for d in range(2, input.dim()):
        n = max(input.shape[d] - 1, 0)
        (a, here), (b, there) = ([t.narrow(d, i, n) for t in (input, keep)] for i in (0, min(n, 1)))
        pair = here & there
        step = torch.where(pair, b - a, 0)
        step = step * torch.where(step.isnan(), step, step.sign()).detach()
        total = total + step.flatten(1).sum(1)
    return _by_image(total, keep.flatten(1).any(1), reduction, empty)


_small = torch.zeros(2, 3, 4, 5)
_record(
    "total_variation",
    _total_variation,
    _image_samples(_images),
    [
        Bad((None,), {}, TypeError, ("total_variation", "input", "tensor", "NoneType")),
        Bad((_small.long(),), {}, TypeError, ("total_variation", "input", "floating", "torch.int64")),
        Bad((_small[0],), {}, ValueError, ("total_variation", "input", "(N, C, H, W)", "(3, 4, 5)")),
        *_bad_options("total_variation", (_small,)),
    ],
    {key: x for key, x in CALL.items() if key != "target"},
    skip={"mixed_dtypes": "one floating operand", "partial_gradients": "one floating operand", **OF_WHOLE},
)

# ---- lpips_distance


def _of_layers(op):
    """The samples' operands are the features of two layers, (N, C, H, W) each, then the weights of each."""

    @functools.wraps(op)
    def call(*operands, mask=None, **options):
        features, weights = operands[:4], [w.reshape(-1) for w in operands[4:]]
        return op(list(features[:2]), list(features[2:]), weights or None, mask=mask, **options)

    return call


def _lpips(features0, features1, weights=None, *, mask=None, reduction="mean", empty="zero"):
    total, exists = 0, True
    for i, (f0, f1) in enumerate(zip(features0, features1)):
        keep = _keep(f0[:, :1], mask)
        units = []
        for f in (f0, f1):
            f = torch.where(keep, f, 0)
            zero = (f == 0).all(1, keepdim=True)
            norm = torch.where(zero, 1, f).square().sum(1, keepdim=True).sqrt()
            units.append(torch.where(zero, 0, f / norm))
        apart = (units[0] - units[1]).square()
        if weights is not None:
            w = weights[i].reshape(-1, 1, 1)
            apart = torch.where(w != 0, apart, 0) * w
        apart, keep = apart.sum(1).flatten(1), keep.flatten(1)
        count = keep.sum(1)
        total, exists = total + apart.sum(1) / count.clamp(min=1), exists & (count > 0)
    return _by_image(total, exists, reduction, empty)


def _lpips_samples():
    def features(*shape, seed):
        return tuple(data(*shape, seed=seed + i) for i in range(4))

    weights = tuple(data(3, 1, 1, seed=30 + i, low=0.25, high=2.0) for i in range(2))
    keys = (0, 1, 2, 3)
    yield Sample(features(2, 3, 4, 5, seed=1), {"mask": mask(2, 1, 4, 5)}, name="masked", masked=keys, slow=True)
    options = {"mask": mask(1, 1, 4, 5, seed=1), "reduction": "none"}
    yield Sample((*features(2, 3, 4, 5, seed=5), *weights), options, name="none, weights", masked=keys)
    yield Sample(features(2, 3, 4, 5, seed=9), {"reduction": "sum"}, name="sum", masked=keys)


def _lpips_terms(sample, outcome):
    """Of unit vectors, whose differences are at most 2 and slopes 4 / |f|; a position's share is at most 1."""
    f = sample.args[:4]
    weights = sample.args[4:] or (torch.ones(1, dtype=torch.float64),) * 2
    largest = max(float(w.abs().max()) for w in weights)
    upstream = outcome.upstream[0].abs().nan_to_num(0, 0, 0).max() if outcome.upstream else torch.ones(())
    images = f[0].shape[0] if sample.kwargs.get("reduction") == "sum" else 1
    sizes = {}
    for i, x in enumerate(f):
        norm = x.nan_to_num(0, 0, 0).norm(dim=1, keepdim=True)
        sizes[i] = upstream * largest * 8 / torch.where(norm == 0, 1, norm)
    sizes |= dict.fromkeys((4, 5), upstream * 4 * f[0].shape[0])
    return 8 * largest * images, sizes


def _bad_features():
    name, x = "lpips_distance", torch.zeros(2, 3, 4, 4)
    one, two, keep = torch.ones(3), torch.zeros(2, 5, 2, 2), torch.ones(2, 1, 4, 4, dtype=torch.bool)
    yield Bad((x, [x]), {}, TypeError, (name, "features0", "list", "Tensor"))
    yield Bad(([x], None), {}, TypeError, (name, "features1", "list", "NoneType"))
    yield Bad(([], []), {}, ValueError, (name, "features0", "got none"))
    yield Bad(([x, two], [x]), {}, ValueError, (name, "features1", "2 layers", "got 1"))
    yield Bad(([x, 1.0], [x, two]), {}, TypeError, (name, "features0[1]", "tensor", "float"))
    yield Bad(([x], [x.long()]), {}, TypeError, (name, "features1[0]", "floating", "torch.int64"))
    yield Bad(([x[0]], [x[0]]), {}, ValueError, (name, "features0[0]", "(N, C, H, W)", "(3, 4, 4)"))
    yield Bad(([x, two], [x, two[:, :4]]), {}, ValueError, (name, "features1[1]", "(2, 4, 2, 2)", "(2, 5, 2, 2)"))
    yield Bad(([x, two[:1]], [x, two[:1]]), {}, ValueError, (name, "features0[1]", "as many images", "(1, 5, 2, 2)"))
    yield Bad(([x], [x.to("meta")]), {}, ValueError, (name, "features1[0]", "meta"))
    yield Bad(([x], [x], one), {}, TypeError, (name, "weights", "list", "Tensor"))
    yield Bad(([x], [x], [one, one]), {}, ValueError, (name, "weights", "1 layers", "got 2"))
    yield Bad(([x], [x], [one[:2]]), {}, ValueError, (name, "weights[0]", "(3,)", "(2,)"))
    yield Bad(([x], [x], [one.long()]), {}, TypeError, (name, "weights[0]", "floating", "torch.int64"))
    yield Bad(([x], [x], [one.to("meta")]), {}, ValueError, (name, "weights[0]", "meta"))
    yield Bad(([x], [x]), {"mask": torch.ones(2, 1, 4, 4)}, TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad(([x], [x]), {"mask": keep[0]}, ValueError, (name, "mask", "(N, 1, H, W)", "(1, 4, 4)"))
    yield Bad(([x], [x]), {"mask": keep.expand(2, 3, 4, 4)}, ValueError, (name, "mask", "(2, 3, 4, 4)"))
    yield Bad(([x], [x]), {"mask": keep.to("meta")}, ValueError, (name, "mask", "meta"))
    yield Bad(([x], [x]), {"reduction": "average"}, ValueError, (name, "reduction", "average"))
    yield Bad(([x], [x]), {"empty": "skip"}, ValueError, (name, "empty", "skip"))
    yield Bad(([x], [x]), {"mask": ~keep, "empty": "raise"}, ValueError, (name, "empty", "raise"))


_record(
    "lpips_distance",
    _lpips,
    _lpips_samples(),
    _bad_features(),
    f"of lists: {HERE}",
    adapt=_of_layers,
    data=(0, 1, 2, 3),
    terms=_lpips_terms,
    skip={
        **OF_WHOLE,
        "errors": "the samples are made lists of: tests/contract/test_bad_calls.py has them",
        "direct": f"the samples are made lists of: {HERE} calls it directly",
        "accumulation": "what is nearly equal cancels; the sums are those of masked_mean, which has it",
    },
)

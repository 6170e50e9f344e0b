"""Cases of the functions of images, on planes of at most 512 x 512. Most functions read two images; their backward also
writes one gradient. Rivals of the SSIM family are pytorch-msssim, kornia, and pytorch-msssim's arithmetic written out:
a convolution for each of five moments."""

import math

import torch
import torch.nn.functional as F

import safeops

from .case import Case, case, data, rival

BETAS = (0.3, 0.3, 0.4)  # three scales: small images are too small for five


def _planes(n, dtype, device, seed, grad=True, channels=1):
    side = max(1, min(512, math.isqrt(n // channels)))
    shape = (max(1, n // (channels * side * side)), channels, side, side)
    return data(math.prod(shape), dtype, device, seed, False, shape).sigmoid().requires_grad_(grad)


def _moments(x, y):
    """Returns (SSIM, contrast term) of each window."""
    g = torch.exp(-((torch.arange(11.0, device=x.device) - 5) ** 2) / 4.5)
    g, channels = (g / g.sum()).to(x.dtype), x.shape[1]

    def blur(z):
        for size in ((11, 1), (1, 11)):
            z = F.conv2d(z, g.reshape(1, 1, *size).expand(channels, 1, *size), groups=channels)
        return z

    mx, my = blur(x), blur(y)
    vx, vy = blur(x * x) - mx * mx, blur(y * y) - my * my  # noqa: SO212
    contrast = (2 * (blur(x * y) - mx * my) + 9e-4) / (vx + vy + 9e-4)
    return contrast * (2 * mx * my + 1e-4) / (mx * mx + my * my + 1e-4), contrast


def _ssim(x, y):
    return _moments(x, y)[0].mean()


def _ms_ssim(x, y):
    value = 1
    for scale, beta in enumerate(BETAS, 1):
        ssim, contrast = _moments(x, y)
        value = value * (ssim if scale == len(BETAS) else contrast).mean((2, 3)).relu() ** beta
        x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
    return value.mean()


def of_two(name, text, theirs, forward=2, backward=3, rivals=(), side=0, **options):
    """Registers a case of a function of two images. forward, backward: how many images each direction reads and writes.
    rivals: [(module, name, options)], libraries' functions, measured if the images' edge is at least `side`."""

    @case(name)
    def build(n, dtype, device):
        x, y = _planes(n, dtype, device, 0), _planes(n, dtype, device, 1, grad=False)
        ours, s = getattr(safeops, name), dtype.itemsize
        results = {f"{module}'s": rival(module, *which) for module, *which in rivals if x.shape[-1] >= side}
        return Case(
            (x,),
            forward_bytes=forward * s,  # read x, y
            backward_bytes=backward * s,  # read x, y; write dx (nothing else is saved)
            ours=lambda x: ours(x, y, **options),
            eager={text: lambda x: theirs(x, y)} | {text: lambda x, f=f: f(x, y) for text, f in results.items() if f},
            compiled=lambda x: theirs(x, y),
            counted=name in ("ssim", "ssim_loss"),
        )


PLANES = {"data_range": 1.0, "channel": 1}
of_two("ssim", "five convolutions", _ssim, rivals=[("pytorch_msssim", "SSIM", PLANES)], side=11)
of_two("ssim_loss", "1 - five convolutions", lambda x, y: 1 - _ssim(x, y), side=11,
       rivals=[("kornia.losses", "SSIMLoss", {"window_size": 11})])  # fmt: skip
of_two("ms_ssim", "five convolutions a scale", _ms_ssim, betas=BETAS, side=161,
       rivals=[("pytorch_msssim", "MS_SSIM", {**PLANES, "weights": list(BETAS)})])  # fmt: skip
of_two("psnr", "10 log10(1 / mse)", lambda x, y: -10 * (x - y).square().mean((1, 2, 3)).log10().mean())


@case("total_variation")
def _variation(n, dtype, device):
    def plain(x):
        return sum((a - b).abs().sum((1, 2, 3)).mean() for a, b in
                   ((x[..., 1:, :], x[..., :-1, :]), (x[..., 1:], x[..., :-1])))  # fmt: skip

    return Case(
        (_planes(n, dtype, device, 0),),
        forward_bytes=dtype.itemsize,  # read x
        backward_bytes=2 * dtype.itemsize,  # read x; write dx
        ours=safeops.total_variation,
        eager={"(x[1:] - x[:-1]).abs().sum() of each dim": plain},
        compiled=plain,
    )


@case("lpips_distance")
def _lpips(n, dtype, device):
    channels = 64
    f0, f1 = (_planes(n, dtype, device, seed, grad=seed == 0, channels=channels) for seed in (0, 1))

    def plain(f0):
        u0, u1 = (f / (f.square().sum(1, keepdim=True).sqrt() + 1e-10) for f in (f0, f1))
        return (u0 - u1).square().sum(1).mean()

    return Case(
        (f0,),
        forward_bytes=2 * dtype.itemsize,  # read both features
        backward_bytes=3 * dtype.itemsize,  # read both features; write the gradient of one
        ours=lambda f0: safeops.lpips_distance([f0], [f1]),
        eager={"(f / (|f| + 1e-10)) of both, as lpips": plain},
        compiled=plain,
        counted=False,
    )

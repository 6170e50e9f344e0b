"""The statistics by name, with their launchers, and the check against their definitions in fp64 and their autograd."""

import importlib

import torch
from safeops.kernels.reductions import statistic_backward

from safeops.ops.reductions._statistic import root
from tests.kernels.interpreted.truth import F32, F64, build, close, fill, kept
from tests.ops import definitions

INF = float("inf")

# name -> (launcher, keyword of its parameter, the parameter, the derivative that the backward takes). The first four
# cover each MODE of the kernel that keeps more than one sum.
STATISTICS = {
    "var": ("masked_var", "correction", 1.0, 0),
    "logsumexp": ("masked_logsumexp", None, 0.0, 2),
    "norm": ("masked_norm", "ord", 2.0, 0),
    "amax": ("masked_amax", None, 0.0, 1),
    "std": ("masked_std", "correction", 1.0, 0),
    "amin": ("masked_amin", None, 0.0, 1),
    "norm inf": ("masked_norm", "ord", INF, 4),
    "norm -inf": ("masked_norm", "ord", -INF, 4),
    "norm 1": ("masked_norm", "ord", 1.0, 3),
    "sum of squares": ("masked_sum_of_squares", None, 0.0, 0),
    "rms": ("masked_rms", None, 0.0, 0),
    "silog": ("silog_loss", "variance_focus", 0.85, 0),
}
FILES = {  # launcher -> the file that defines it, where that is another op's
    "masked_std": "masked_var",
    "masked_amin": "masked_amax",
    "masked_rms": "masked_norm",
    "masked_sum_of_squares": "masked_norm",
    "silog_loss": "masked_var",
}
MODES = list(STATISTICS)[:4]


def silog_loss(x, mask, dim, *, variance_focus, **options):
    """Returns silog_loss, given x = log(input) - log(target)."""
    mean = definitions.masked_mean(x, mask, dim, **options)
    return root(definitions.masked_var(x, mask, dim, correction=0, **options) + (1 - variance_focus) * mean * mean)


def define(name, x, mask=None, weight=None, dim=(), keepdim=False, **options):
    launcher, keyword, parameter, _ = STATISTICS[name]
    options = {keyword: parameter} | options if keyword else options
    weight = None if weight is None else weight.double()
    definition = silog_loss if name == "silog" else getattr(definitions, launcher)
    return definition(x, mask, tuple(dim) or None, keepdim=keepdim, weight=weight, **options)


def run(name, x, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=None):
    launcher, _, usual, _ = STATISTICS[name]
    file = FILES.get(launcher, launcher)
    f = getattr(importlib.import_module(f"safeops.kernels.reductions.{file}"), launcher)
    return f(x, mask, weight, dim, keepdim, empty_nan, dtype, usual if parameter is None else parameter)


def backward(name, grad, x, origin, scale, mask=None, weight=None, dim=None, keepdim=False):
    f = statistic_backward.statistic_backward
    return f(grad, x, origin, scale, mask, weight, STATISTICS[name][3], dim, keepdim)


def check(name, x, mask, weight, dim, keepdim=False, scale=1.0):
    out = F64 if x.dtype == F64 else F32
    value, origin, factor = run(name, x, mask, weight, dim, keepdim, dtype=out)
    leaf = x.double().requires_grad_()
    expected = define(name, leaf, mask, weight, dim, keepdim)
    grad = fill(expected.shape, F32, 9)
    (gradient,) = torch.autograd.grad(expected, leaf, grad.double())
    expected = expected.detach()
    assert origin.dtype == factor.dtype == F64 and origin.shape == factor.shape == value.shape
    close(value, expected, torch.maximum(expected.abs(), torch.full_like(expected, scale)), out)
    dx = backward(name, grad, x, origin, factor, mask, weight, dim, keepdim)
    assert dx.dtype == x.dtype and dx.stride() == torch.empty_like(x).stride()
    assert not dx[~kept(x.shape, mask, weight)].any()
    close(dx, gradient, gradient.abs().max() * 2 if gradient.numel() else None, x.dtype)


def example(layout, dtype=F32, w_dtype=F32):
    x, _, mask, weight = build(layout, dtype, w_dtype=w_dtype)
    return x, mask, None if weight is None else weight.abs()

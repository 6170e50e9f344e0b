"""dice_loss, tversky_loss from the sums of their regions, and the gradients of the sums: one block, in fp64.

    loss = w (1 - numerator / total)    a mean divides by the count of kept regions, or by the sum of their weights

I/O: a few numbers per region, which the kernel of the sums leaves in L2. The backward computes what the mean divides by
again, from the sums.
"""

import torch
import triton
import triton.language as tl

from ..engine.buffers import empty
from ..engine.indexing import Group
from ..engine.kernel import Kernel
from ..engine.launch import Plan, cached_plan
from ..engine.operand import constants
from ..engine.tensors import check_operands, traits

NONE, MEAN = tl.constexpr(0), tl.constexpr(1)  # REDUCTION, from safeops.core.loss_reduction
TILE = 1024  # regions


@triton.jit
def load_regions(sums, n, c, images, classes):
    """Returns (sums of p t, of p, of t, number of kept pixels) of a tile of regions."""
    inside, size = (n < images) & (c < classes), images * classes
    at = sums + n * classes + c
    both = tl.load(at, mask=inside, other=0.0)
    p = tl.load(at + size, mask=inside, other=0.0)
    t = tl.load(at + 2 * size, mask=inside, other=0.0)
    return both, p, t, tl.load(at + 3 * size, mask=inside, other=0.0)


@triton.jit
def regions_from(sums, first, c, images, classes, config):
    """`load_regions` of BN images from `first` on; with BATCH the sums over all images, as one row."""
    n = tl.arange(0, config.BN)[:, None]
    if config.BATCH:
        both = tl.zeros([config.BN, config.BC], tl.float64)
        p, t, count = both, both, both
        for start in range(0, images, config.BN):
            more, more_p, more_t, more_count = load_regions(sums, start + n, c, images, classes)
            both += more
            p += more_p
            t += more_t
            count += more_count
        both, p = tl.sum(both, 0, keep_dims=True), tl.sum(p, 0, keep_dims=True)
        t, count = tl.sum(t, 0, keep_dims=True), tl.sum(count, 0, keep_dims=True)
    else:
        both, p, t, count = load_regions(sums, first + n, c, images, classes)
    return both, p, t, count


@triton.jit
def quotient(both, p, t, smooth, parameters, TVERSKY: tl.constexpr):
    """Returns (numerator, total, True where total is 0); a total of 0 is replaced by 1."""
    if TVERSKY:
        total = both + parameters[0] * (p - both) + parameters[1] * (t - both) + smooth[1]
        numerator = both + smooth[0]
    else:
        total = p + t + smooth[1]
        numerator = 2 * both + smooth[0]
    zero = total == 0
    return numerator, tl.where(zero, 1.0, total), zero


@triton.jit
def to_double(x):
    """x in fp64. (Halves by way of fp32, to which all GPUs convert them.)"""
    return x if x.dtype == tl.float64 else x.to(tl.float32).to(tl.float64)


@triton.jit
def store(pointer, value, inside):
    kind = pointer.dtype.element_ty
    tl.store(pointer, value if kind == tl.float64 else value.to(tl.float32).to(kind), mask=inside)


@triton.jit
def load_weights(weight, weight_stride, c, classes):
    if weight is None:
        result = tl.full(c.shape, 1.0, tl.float64)
    else:
        result = to_double(tl.load(weight + c * weight_stride, mask=c < classes, other=0.0))
    return result


@triton.jit
def region_losses(sums, w, first, c, images, classes, smooth, parameters, config):
    """Returns (loss without its weight, numerator, total, True where total is not 0, True where a region is kept)."""
    both, p, t, count = regions_from(sums, first, c, images, classes, config)
    numerator, total, zero = quotient(both, p, t, smooth, parameters, config.TVERSKY)
    return 1 - tl.where(zero, 1.0, numerator / total), numerator, total, ~zero, (count > 0) & (w != 0)


@triton.jit
def reduced(sums, weight, weight_stride, images, classes, smooth, parameters, config):
    """Returns (sum of the losses, number of kept regions, sum of their weights)."""
    loss = tl.zeros([1 if config.BATCH else config.BN, config.BC], tl.float64)
    kept, weights = loss, loss
    for c0 in range(0, classes, config.BC):
        c = c0 + tl.arange(0, config.BC)[None, :]
        w = load_weights(weight, weight_stride, c, classes)
        for first in range(0, 1 if config.BATCH else images, config.BN):
            value, _, _, _, keep = region_losses(sums, w, first, c, images, classes, smooth, parameters, config)
            loss += tl.where(keep, value * w, 0.0)
            kept += tl.where(keep, 1.0, 0.0)
            weights += tl.where(keep, w, 0.0)
    return tl.sum(tl.sum(loss, 1), 0), tl.sum(tl.sum(kept, 1), 0), tl.sum(tl.sum(weights, 1), 0)


@triton.jit
def divisor_of(kept, weights, weight, denominator, divisor, config):
    """Returns (by, nothing): the divisor of a mean, inf if nothing is kept; True if the mean is over nothing."""
    if denominator is not None:
        by = tl.load(denominator).to(tl.float64)
        nothing = by == 0
    elif config.BY_NUMBER:
        by = divisor + kept * 0
        nothing = by == 0
    else:
        by = kept if weight is None else weights
        nothing = kept == 0
    return tl.where(nothing | (kept == 0), float("inf"), by), nothing


RegionLossConfig = constants("REDUCTION EMPTY_NAN BATCH BY_NUMBER TVERSKY BN BC VEC")


@triton.jit
def region_loss_kernel(
    sums: tl.pointer_type, weight: tl.pointer_type, denominator: tl.pointer_type, out: tl.pointer_type,
    smooth: tl.float64, divisor: tl.float64, parameters: tl.float64, images: tl.tensor, classes: tl.tensor,
    weight_stride: tl.tensor, config: RegionLossConfig,
):  # fmt: skip
    smooth = tl.tuple([tl.full([1, 1], x, tl.float64) for x in smooth])
    parameters = tl.tuple([tl.full([1, 1], x, tl.float64) for x in parameters])
    if config.REDUCTION == NONE:
        for c0 in range(0, classes, config.BC):
            c = c0 + tl.arange(0, config.BC)[None, :]
            w = load_weights(weight, weight_stride, c, classes)
            rows = 1 if config.BATCH else images
            for first in range(0, rows, config.BN):
                value, _, _, _, keep = region_losses(sums, w, first, c, images, classes, smooth, parameters, config)
                n = first + tl.arange(0, 1 if config.BATCH else config.BN)[:, None]
                value = tl.where(keep, value * w, float("nan") if config.EMPTY_NAN else 0.0)
                store(out + n * classes + c, value, (n < rows) & (c < classes))
    else:
        value, kept, weights = reduced(sums, weight, weight_stride, images, classes, smooth, parameters, config)
        nothing = kept == 0
        if config.REDUCTION == MEAN:
            by, nothing = divisor_of(kept, weights, weight, denominator, divisor, config)
            value = value / by
        value = tl.where(kept > 0, value, 0.0)
        if config.EMPTY_NAN:
            value = tl.where(nothing, float("nan"), value)
        tl.store(out, value.to(out.dtype.element_ty))


@triton.jit
def region_loss_backward_kernel(
    grad: tl.pointer_type, sums: tl.pointer_type, weight: tl.pointer_type, denominator: tl.pointer_type,
    out: tl.pointer_type, weight_out: tl.pointer_type, smooth: tl.float64, divisor: tl.float64,
    parameters: tl.float64, images: tl.tensor, classes: tl.tensor, weight_stride: tl.tensor, grad_strides: tl.tuple,
    config: RegionLossConfig,
):  # fmt: skip
    smooth = tl.tuple([tl.full([1, 1], x, tl.float64) for x in smooth])
    parameters = tl.tuple([tl.full([1, 1], x, tl.float64) for x in parameters])
    BATCH: tl.constexpr = config.BATCH
    rows, size = 1 if BATCH else images, images * classes
    upstream = tl.zeros([1, 1], tl.float64)
    of_divisor = upstream  # the part of a weight's gradient that comes through a mean's divisor
    if config.REDUCTION != NONE:
        upstream += tl.load(grad).to(tl.float64)
    if config.REDUCTION == MEAN:
        loss, kept, weights = reduced(sums, weight, weight_stride, images, classes, smooth, parameters, config)
        by, _ = divisor_of(kept, weights, weight, denominator, divisor, config)
        upstream = upstream / by
        if denominator is None and not config.BY_NUMBER and weight is not None:
            of_divisor -= upstream * (loss / by)
    for c0 in range(0, classes, config.BC):
        c = c0 + tl.arange(0, config.BC)[None, :]
        w = load_weights(weight, weight_stride, c, classes)
        of_weight = tl.zeros([1 if BATCH else config.BN, config.BC], tl.float64)
        for first in range(0, rows, config.BN):
            n = first + tl.arange(0, 1 if BATCH else config.BN)[:, None]
            value, numerator, total, sloped, keep = region_losses(
                sums, w, first, c, images, classes, smooth, parameters, config
            )
            g = upstream
            if config.REDUCTION == NONE:
                inside = (n < rows) & (c < classes)
                g = tl.load(grad + n * grad_strides[0] + c * grad_strides[1], mask=inside, other=0.0).to(tl.float64)
            of_weight += tl.where(keep, g * value + of_divisor, 0.0)
            # (1) the slopes of -w numerator / total by the numerator and the total; (2) from them, by both, p and t
            of_numerator = -(w * g) / total
            of_total = -of_numerator * (numerator / total)
            if config.TVERSKY:
                both = of_numerator + (of_total - parameters[0] * of_total - parameters[1] * of_total)
                p, t = parameters[0] * of_total, parameters[1] * of_total
            else:
                both, p, t = 2 * of_numerator, of_total, of_total
            live = keep & sloped
            both, p, t = tl.where(live, both, 0.0), tl.where(live, p, 0.0), tl.where(live, t, 0.0)
            if out is not None:
                for start in range(0, images if BATCH else 1, config.BN):
                    row = start + tl.arange(0, config.BN)[:, None] if BATCH else n
                    at, inside = out + row * classes + c, (row < images) & (c < classes)
                    tl.store(at, both, mask=inside)
                    tl.store(at + size, p, mask=inside)
                    tl.store(at + 2 * size, t, mask=inside)
                    tl.store(at + 3 * size, p * 0, mask=inside)  # a count has no slope
        if weight_out is not None:
            of_weight = tl.sum(of_weight, 0, keep_dims=True)
            store(weight_out + c, of_weight, c < classes)


REGION_LOSS, REGION_LOSS_BACKWARD = Kernel(region_loss_kernel), Kernel(region_loss_backward_kernel)
# ---- host


def loss_plan(kernel, dtypes, sums, weight, divisor, reduction, empty_nan, batch, parameters, arch=None, **values):
    """dtypes: of the kernel's pointers, by name."""
    images, classes = sums.shape[1:]
    columns = 8 if classes <= 8 else 128
    values |= {
        "images": images,
        "classes": classes,
        "weight_stride": 0 if weight is None else weight.stride(0),
        "smooth": 2,
        "parameters": parameters,
        "REDUCTION": reduction,
        "EMPTY_NAN": empty_nan,
        "BATCH": batch,
        "BY_NUMBER": divisor is not None,
        "TVERSKY": parameters > 0,
        "BN": TILE // columns,
        "BC": columns,
        "VEC": 1,
    }
    nothing = Group((), ())
    return Plan(kernel, (), dtypes, nothing, nothing, (), 1, values, grid=(1, 1), wide=False, arch=arch)


def _launch(kernel, names, tensors, sums, weight, divisor, smooth, parameters, options, **values):
    """names: of the kernel's pointers, in order. tensors: one for each of these names, or None."""
    result, addresses = traits(tensors)

    def build(arch):
        check_operands(kernel.fn.__name__, *tensors)
        if sums.dtype != torch.float64 or not sums.is_contiguous():
            raise ValueError(f"{kernel.fn.__name__}: sums must be contiguous, in float64")
        dtypes = {name: None if x is None else x.dtype for name, x in zip(names, tensors)}
        return loss_plan(kernel, dtypes, sums, weight, divisor, *options, len(parameters), arch, **values)

    key = id(kernel), result, divisor is None, options, len(parameters)
    launch_plan = cached_plan(key, build, sums.device)
    launch_plan(tensors, addresses, *smooth, 1.0 if divisor is None else float(divisor), *parameters)


FORWARD = "sums", "weight", "denominator", "out"
BACKWARD = "grad", "sums", "weight", "denominator", "out", "weight_out"


def region_loss(
    sums, weight, denominator, divisor, reduction, empty_nan, batch, dtype, smooth_nr, smooth_dr, alpha=None, beta=None
):
    """The loss from the sums: the Tversky loss, or without alpha and beta the Dice loss."""
    shape = () if reduction else tuple(sums.shape[2:] if batch else sums.shape[1:])
    out, options = empty(shape, dtype, sums.device), (reduction, empty_nan, batch)
    tensors = sums, weight, denominator, out
    numbers = (smooth_nr, smooth_dr), () if alpha is None else (alpha, beta)
    _launch(REGION_LOSS, FORWARD, tensors, sums, weight, divisor, *numbers, options)
    return out


def region_loss_backward(
    grad, sums, weight, denominator, divisor, reduction, empty_nan, batch, smooth_nr, smooth_dr, alpha, beta,
    need_sums, need_weight,
):  # fmt: skip
    """Returns (gradient of the sums, gradient of the weight); a gradient that is not needed has no elements."""
    out = empty(tuple(sums.shape) if need_sums else (0,), torch.float64, sums.device)
    like = sums if weight is None else weight
    weight_out = empty(tuple(like.shape) if need_weight else (0,), like.dtype, sums.device)
    outputs = out if need_sums else None, weight_out if need_weight else None
    tensors, options = (grad, sums, weight, denominator, *outputs), (reduction, empty_nan, batch)
    strides = (0, 0) if reduction else (0, *grad.stride())[-2:]
    numbers = (smooth_nr, smooth_dr), () if alpha is None else (alpha, beta)
    _launch(REGION_LOSS_BACKWARD, BACKWARD, tensors, sums, weight, divisor, *numbers, options, grad_strides=strides)
    return out, weight_out

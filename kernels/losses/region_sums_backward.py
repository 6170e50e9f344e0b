"""The gradients of the region losses' sums: dp = keep ? both t + marginal : 0 (squared: both t + 2 marginal p), where
`both` is the gradient of a region's sum of p t, and `marginal` that of its sum of p. For dt, p and t change places, and
`marginal` is the gradient of the region's sum of t.

I/O: reads the mask; for dp the target, for dt the prediction, and if squared both; writes dp, dt. Class indices are
read once for eight classes of a pixel.
"""

import torch
import triton
import triton.language as tl

from ..engine import tiling
from ..engine.kernel import Config, Kernel
from ..engine.launch import cached_plan
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.scaling import apart, reciprocal
from ..engine.tensors import traits
from ..engine.tile import corner, in_batch, indices, is_whole, store, within
from .regions import SUMS, check, class_numbers, image_of, plan, region_tile


@triton.jit
def high_and_low(number, C: tl.constexpr):
    """An fp64 number as the sum of two numbers of dtype C."""
    high = number.to(C)
    low = tl.where(tl.abs(high) < float("inf"), number - high.to(tl.float64), 0.0)
    return high, low.to(C)


@triton.jit
def scaled(both, marginal, SQUARED: tl.constexpr, C: tl.constexpr):
    """Returns (both, marginal, power), the first two divided by a power of two, and split by high_and_low.

    These numbers may be out of the range of fp32, if what they multiply is at its other end. power has half their
    exponent: neither a product nor the result, which power multiplies, overflows or loses bits on the way. Without
    SQUARED, marginal multiplies nothing, and may be far larger than both."""
    power = tl.full([1, 1], 1.0, C)
    if C != tl.float64:
        limit = tl.abs(marginal) if SQUARED else tl.abs(marginal) * 2.0**-120
        power = apart(tl.where(tl.abs(both) < limit, limit, tl.abs(both)))[1]
        inverse = reciprocal(power).to(tl.float64)
        both, marginal = both * inverse, marginal * inverse
    return high_and_low(both, C), high_and_low(marginal, C), power


@triton.jit
def slope(factors, other, x, SQUARED: tl.constexpr):
    """both other + marginal (SQUARED: marginal x), from a region's numbers as `scaled` returns them.

    The two terms may cancel: they are added in twice the digits of fp32, with fused products for what fp32 rounds away.
    (In fp64 the low parts of the numbers are 0.)"""
    both, marginal, power = factors
    term, rest = marginal
    if SQUARED:
        term = marginal[0] * x
        rest = tl.fma(marginal[0], x, -term) + marginal[1] * x
    value = tl.fma(both[0], other, term)
    return tl.where(tl.abs(value) < float("inf"), value + (both[1] * other + rest), value) * power


@triton.jit
def backward_tile(out, dy, x, y, mask, exists, of_input, of_target, number, there, classes, ignored, space, m, n,
                  config, EDGE: tl.constexpr):  # fmt: skip
    SQUARED: tl.constexpr = config.SQUARED
    p, t, keep = region_tile(x, y, mask, number, classes, ignored, space, m, n, config, EDGE)  # (BM, BN) each
    if exists is not None:
        keep &= there
    # select, do not multiply: the gradient may be NaN where an element is not kept
    inside = within(space, m, n)
    if out is not None:
        if config.INDEXED and not SQUARED:
            value = tl.where(t != 0, of_input[0], of_input[1])
        else:
            value = slope(of_input, t, p, SQUARED)  # dp = both t + marginal, or both t + 2 marginal p
        store(out, space, m, n, tl.where(keep, value, 0.0), inside, EDGE)
    if dy is not None:
        store(dy, space, m, n, tl.where(keep, slope(of_target, p, t, SQUARED), 0.0), inside, EDGE)


RegionSumsBackwardConfig = constants("INDEXED SQUARED AXIS BM BN VEC C I")


@triton.jit
def region_sums_backward_kernel(
    out: Operand, dy: Operand, x: Operand, y: Operand, mask: Operand, exists: tl.pointer_type, grad: tl.pointer_type,
    grad_strides: tl.tuple, classes: tl.tensor, ignored: tl.tensor, exists_stride: tl.tensor, space: Space,
    parts: Parts, config: RegionSumsBackwardConfig,
):  # fmt: skip
    C: tl.constexpr = config.C
    INDEXED: tl.constexpr = config.INDEXED
    SQUARED: tl.constexpr = config.SQUARED
    image, block = image_of(classes, config)
    space = in_batch(space, image, (out, dy, x, y, mask))

    # The gradients of the sums of each class of the block, converted once for all its tiles: fp64 is slow on most GPUs.
    number = class_numbers(block, config)
    gradients = grad + image * grad_strides[1] + number * grad_strides[2]
    inside, twice = number < classes, 2.0 if SQUARED else 1.0
    there = inside
    if exists is not None:  # a bool for each class
        there = tl.load(exists + number * exists_stride, mask=inside, other=0)
    both = tl.load(gradients, mask=inside, other=0.0)
    marginal = tl.load(gradients + grad_strides[0], mask=inside, other=0.0) * twice
    marginal_target = tl.load(gradients + 2 * grad_strides[0], mask=inside, other=0.0) * twice
    of_target = scaled(both, marginal_target, SQUARED, C)
    if INDEXED and not SQUARED:  # the slope is one of two numbers: in pixels of the class, in others
        of_input = (both + marginal).to(C), (both * 0 + marginal).to(C)
    else:
        of_input = scaled(both, marginal, SQUARED, C)

    first = tl.program_id(1).to(config.I) * parts.per_split
    for tile in range(first, tl.minimum(first + parts.per_split, parts.tiles)):
        m0, n0 = corner(space, block, tile, config)
        m, n = indices(m0, n0, config)
        # (in a whole tile, the comparisons of indices with classes would go through shared memory)
        if config.VEC == 1 or INDEXED:
            in_bounds = False
        else:
            in_bounds = is_whole(space, m0, n0, config)
        if in_bounds:
            backward_tile(
                out, dy, x, y, mask, exists, of_input, of_target, number, there, classes, ignored, space, m, n, config,
                False,
            )  # fmt: skip
        else:
            backward_tile(
                out, dy, x, y, mask, exists, of_input, of_target, number, there, classes, ignored, space, m, n, config,
                True,
            )  # fmt: skip


# Without a limit the general variant spills.
REGION_SUMS_BACKWARD = Kernel(region_sums_backward_kernel, {None: Config(max_registers=(None, 168))})


def backward_plan(grad, tensors, like, exists, ignore_index, squared, arch=None):
    """tensors: in the kernel's order."""
    return plan(
        REGION_SUMS_BACKWARD, tensors, 3, like, exists, ignore_index, squared, {"grad": torch.float64}, arch,
        grad_strides=grad.stride(),
    )  # fmt: skip


def region_sums_backward(
    grad, input, target, mask=None, exists=None, ignore_index=None, squared=False, need_input=True, need_target=False
):
    """Returns (gradient of input, gradient of target); a gradient that is not needed has no elements."""
    name = "region_sums_backward"
    check(name, input, target, mask, exists)
    if grad.dtype != torch.float64 or grad.shape != (SUMS.value, *input.shape[:2]) or grad.device != input.device:
        raise ValueError(f"{name}: grad must be float64 of shape (4, N, C), got {grad.dtype} {tuple(grad.shape)}")
    if need_target and target.dtype == torch.int64:
        raise ValueError(f"{name}: class indices have no gradient")
    device, dtype = input.device, target.dtype if target.is_floating_point() else torch.float32
    dx = torch.empty_like(input) if need_input else input.new_empty(0)
    dy = torch.empty_like(target) if need_target else target.new_empty(0, dtype=dtype)
    if input.numel() and (need_input or need_target):
        # without squares, the gradient of input reads only target, and that of target only input
        x = input if squared or need_target else None
        y = target if squared or need_input else None
        tensors = (dx if need_input else None, dy if need_target else None, x, y, mask)
        result, addresses = traits((*tensors, exists, grad))
        key = id(REGION_SUMS_BACKWARD), result, input.shape, ignore_index, squared, tiling.POLICY
        launch_plan = cached_plan(
            key, lambda arch: backward_plan(grad, tensors, input, exists, ignore_index, squared, arch), device
        )
        launch_plan((*tensors, exists, grad), addresses)
    return dx, dy

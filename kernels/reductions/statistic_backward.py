"""The backward of every statistic: dx = keep ? (grad * scale) * w * slope(x, origin) : 0, in one elementwise launch.

Each output has one fp64 origin and one fp64 scale: grad * scale may be out of the range of fp32 where dx is not. A
functor takes x, the origin as the sum of two numbers (in fp64 the second is 0), and c, which is grad * scale or a
factor of it. It returns c * slope(x, origin).
Functors that compare select c, and do not multiply it by 0: a NaN or inf from upstream stays with the extreme.
"""

import torch
import triton
import triton.language as tl

from ..engine.elementwise import compute_dtype, plan, tile_corner
from ..engine.kernel import Kernel
from ..engine.launch import cached_plan
from ..engine.operand import Operand, Space, constants
from ..engine.scaling import BEYOND, MARKED, apart
from ..engine.state import less_maximum
from ..engine.tensors import check_operands, traits
from ..engine.tile import fetch, indices, is_whole, kept, store, within
from ..engine.tiling import reduced_dims, restore_dims


@triton.jit
def linear(x, origin, rest, c):
    return ((x - origin) - rest) * c


@triton.jit
def equal(x, origin, rest, c):
    return tl.where((x == origin) | ((x != x) & (origin != origin)), c, 0.0)


@triton.jit
def exponential(x, origin, rest, c):
    return tl.exp(less_maximum(x, origin) - rest) * c


@triton.jit
def sign(x, origin, rest, c):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x)) * c  # 0 at 0, NaN at NaN


@triton.jit
def sign_of_equal(x, origin, rest, c):
    return equal(tl.abs(x), origin, rest, sign(x, origin, rest, c))


SLOPES = (linear, equal, exponential, sign, sign_of_equal)  # by the raw op's `kind`
COMPARING = (equal, sign_of_equal)  # for these the weight is only a mask


StatisticBackwardConfig = constants("F COMPARES BM BN VEC C I")


@triton.jit
def gradient(x, origin, weight, grad, scale, w, keep, space, m, n, config, EDGE: tl.constexpr):
    """grad * scale * w * slope. In fp64 grad comes last: for a small norm, grad * scale alone may overflow."""
    C: tl.constexpr = config.C
    WEIGHED: tl.constexpr = weight is not None and not config.COMPARES
    v = fetch(x, space, m, n, keep, EDGE).to(C)  # (BM, BN); numbers per output: (BM, 1) or (1, BN)
    o = fetch(origin, space, m, n, keep, EDGE).to(tl.float64)
    c = fetch(grad, space, m, n, keep, EDGE).to(tl.float64)
    by = fetch(scale, space, m, n, keep, EDGE).to(tl.float64)
    c = tl.where(by == 0, 0.0, c)  # no statistic, or a constant one: 0 whatever the gradient
    if C == tl.float64:
        if config.COMPARES:
            value = config.F(v, o, tl.zeros([1, 1], C), c * by)
        else:
            value = config.F(v, o, tl.zeros([1, 1], C), tl.where(by <= MARKED, -by, by))
            if WEIGHED:
                value = value * w.to(C)
            value = value * tl.where(by <= MARKED, BEYOND, 1.0) * c
    else:
        high = o.to(tl.float32)  # (x - high) - low has all digits, without fp64 per element
        low = tl.where(tl.abs(o) < float("inf"), o - high.to(tl.float64), 0.0).to(tl.float32)
        c, power = apart(c * by)
        value = config.F(v, high, low, c)
        if WEIGHED:
            value = value * w.to(C)  # not c * w: c may be as large as 2^126
        value = value * power
    return value


@triton.jit
def statistic_backward_tile(x, origin, mask, weight, grad, scale, out, space, m, n, config, EDGE: tl.constexpr):
    keep, w = kept(mask, weight, space, m, n, config, EDGE)
    value = gradient(x, origin, weight, grad, scale, w, keep, space, m, n, config, EDGE)
    store(out, space, m, n, tl.where(keep, value, 0.0), within(space, m, n), EDGE)


@triton.jit
def statistic_backward_kernel(
    x: Operand, origin: Operand, mask: Operand, weight: Operand, grad: Operand, scale: Operand, out: Operand,
    space: Space, config: StatisticBackwardConfig,
):  # fmt: skip
    m0, n0 = tile_corner(space, config)
    m, n = indices(m0, n0, config)
    if config.VEC == 1:
        in_bounds = False
    else:
        in_bounds = is_whole(space, m0, n0, config)
    if in_bounds:
        statistic_backward_tile(x, origin, mask, weight, grad, scale, out, space, m, n, config, False)
    else:
        statistic_backward_tile(x, origin, mask, weight, grad, scale, out, space, m, n, config, True)


PER_OUTPUT = (1, 4, 5)  # indices of origin, grad and scale among the operands
STATISTIC_BACKWARD = Kernel(statistic_backward_kernel)


def backward_plan(slope, tensors, shape, arch=None):
    """tensors in the kernel's order."""
    x, _, _, weight, grad, *_ = tensors
    constants = {"F": slope, "COMPARES": slope in COMPARING}
    return plan(STATISTIC_BACKWARD, tensors, 1, shape, compute_dtype(x, weight, grad), constants, arch, PER_OUTPUT)


def statistic_backward(grad, input, origin, scale, mask=None, weight=None, kind=0, dim=None, keepdim=False):
    if not keepdim:
        reduced = reduced_dims(input.shape, dim)
        grad, origin, scale = (restore_dims(t, reduced) for t in (grad, origin, scale))
    out = torch.empty_like(input)
    if out.numel():
        tensors, slope = (input, origin, mask, weight, grad, scale, out), SLOPES[kind]
        result, addresses = traits(tensors)

        def build(arch):
            check_operands("statistic_backward", *tensors)
            return backward_plan(slope, tensors, out.shape, arch)

        cached_plan((id(slope), result), build, input.device)(tensors, addresses)
    return out

"""The backward of every statistic: dx = keep ? (grad * scale) * w * slope(x, origin) : 0, in one elementwise launch.

There is one fp64 origin and one fp64 scale for each output: the product grad * scale may lie outside the range of fp32
where the gradient does not. A functor gives c * slope. It takes x, the origin as the sum of two numbers (in fp64 the
second is 0), and c. Those that compare select c and do not multiply it by 0: a NaN or inf from upstream stays with the
extreme.
"""

import torch
import triton
import triton.language as tl

from ..engine.elementwise import compute_dtype, plan, tile_corner
from ..engine.kernel import Kernel
from ..engine.launch import cached_plan, check_operands, traits
from ..engine.scaling import BEYOND, MARKED, apart
from ..engine.state import below
from ..engine.tile import fetch, indices, kept, store, within
from ..engine.tiling import reduced_dims, restore_dims


@triton.jit
def linear(x, origin, rest, c):
    return ((x - origin) - rest) * c


@triton.jit
def equal(x, origin, rest, c):
    return tl.where((x == origin) | ((x != x) & (origin != origin)), c, 0.0)


@triton.jit
def exponential(x, origin, rest, c):
    return tl.exp(below(x, origin) - rest) * c


@triton.jit
def sign(x, origin, rest, c):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x)) * c  # 0 at 0, NaN at NaN


@triton.jit
def sign_of_equal(x, origin, rest, c):
    return equal(tl.abs(x), origin, rest, sign(x, origin, rest, c))


SLOPES = (linear, equal, exponential, sign, sign_of_equal)  # by the raw op's `kind`
COMPARING = (equal, sign_of_equal)  # where the weight counts only as a mask


@triton.jit
def gradient(
    space, x, origin, grad, scale, w, keep, m, n,
    F: tl.constexpr, X: tl.constexpr, ORIGIN: tl.constexpr, WEIGHED: tl.constexpr, GRAD: tl.constexpr,
    SCALE: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr, COMPARES: tl.constexpr,
):  # fmt: skip
    """(grad * scale) * w * slope; in fp64 grad comes last: of a small norm, grad * scale may overflow alone."""
    v = fetch(x, space, m, n, keep, X, EDGE).to(C)
    o = fetch(origin, space, m, n, keep, ORIGIN, EDGE).to(tl.float64)
    c = fetch(grad, space, m, n, keep, GRAD, EDGE).to(tl.float64)
    by = fetch(scale, space, m, n, keep, SCALE, EDGE).to(tl.float64)
    c = tl.where(by == 0, 0.0, c)  # there is no statistic, or it is constant: 0 whatever the gradient
    if C == tl.float64:
        if COMPARES:
            value = F(v, o, tl.zeros([1, 1], C), c * by)
        else:
            value = F(v, o, tl.zeros([1, 1], C), tl.where(by <= MARKED, -by, by))
            if WEIGHED:
                value = value * w.to(C)
            value = value * tl.where(by <= MARKED, BEYOND, 1.0) * c
    else:
        high = o.to(tl.float32)  # (x - high) - low: to all digits, without fp64 per element
        low = tl.where(tl.abs(o) < float("inf"), o - high.to(tl.float64), 0.0).to(tl.float32)
        c, power = apart(c * by)
        value = F(v, high, low, c)
        if WEIGHED:
            value = value * w.to(C)  # not c * w: c may be as large as 2^126
        value = value * power
    return value


@triton.jit
def statistic_backward_tile(
    space, x, origin, mask, weight, grad, scale, out, m, n,
    F: tl.constexpr, COMPARES: tl.constexpr, X: tl.constexpr, ORIGIN: tl.constexpr, MASK: tl.constexpr,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, SCALE: tl.constexpr, OUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    keep, w = kept(space, mask, weight, m, n, MASK, WEIGHT, BM, BN, EDGE)
    value = gradient(
        space, x, origin, grad, scale, w, keep, m, n,
        F, X, ORIGIN, WEIGHT and not COMPARES, GRAD, SCALE, C, EDGE, COMPARES,
    )  # fmt: skip
    store(out, space, m, n, tl.where(keep, value, 0.0), within(space, m, n), OUT, EDGE)


@triton.jit
def statistic_backward_kernel(
    x, origin, mask, weight, grad, scale, out,
    outer_shape, inner_shape, x_outer, x_inner, origin_outer, origin_inner, mask_outer, mask_inner,
    weight_outer, weight_inner, grad_outer, grad_inner, scale_outer, scale_inner, out_outer, out_inner,
    M, N,
    F: tl.constexpr, COMPARES: tl.constexpr, X: tl.constexpr, ORIGIN: tl.constexpr, MASK: tl.constexpr,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, SCALE: tl.constexpr, OUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    space = (M, N, outer_shape, inner_shape)
    xs, origins = (x, x_outer, x_inner), (origin, origin_outer, origin_inner)
    masks, ws = (mask, mask_outer, mask_inner), (weight, weight_outer, weight_inner)
    gs, scales, outs = (grad, grad_outer, grad_inner), (scale, scale_outer, scale_inner), (out, out_outer, out_inner)
    m0, n0 = tile_corner(N, BM, BN, I)
    m, n = indices(m0, n0, BM, BN, VEC, I)
    if VEC == 1:
        whole = False
    else:
        whole = (m0 + BM <= M) & (n0 + BN <= N)
    if whole:  # needs no bounds
        statistic_backward_tile(
            space, xs, origins, masks, ws, gs, scales, outs, m, n,
            F, COMPARES, X, ORIGIN, MASK, WEIGHT, GRAD, SCALE, OUT, BM, BN, C, False,
        )  # fmt: skip
    else:
        statistic_backward_tile(
            space, xs, origins, masks, ws, gs, scales, outs, m, n,
            F, COMPARES, X, ORIGIN, MASK, WEIGHT, GRAD, SCALE, OUT, BM, BN, C, True,
        )  # fmt: skip


OPERANDS = ("x", "origin", "mask", "weight", "grad", "scale", "out")
PER_OUTPUT = (1, 4, 5)  # origin, grad and scale in their places among the operands
STATISTIC_BACKWARD = Kernel(
    statistic_backward_kernel,
    pointers=OPERANDS,
    floats=(),
    operands=OPERANDS,
    tuples=(),
    indices=("M", "N"),
    constants=("F", "COMPARES", *(name.upper() for name in OPERANDS), "BM", "BN", "VEC", "C", "I"),
)


def backward_plan(slope, tensors, shape, arch=None):
    """tensors in the order of OPERANDS."""
    x, _, _, weight, grad, *_ = tensors
    constants = {"F": slope, "COMPARES": slope in COMPARING}
    return plan(
        STATISTIC_BACKWARD, tensors, 1, shape, compute_dtype(x, weight, grad), constants, arch, PER_OUTPUT
    )  # fmt: skip


def statistic_backward(grad, input, origin, scale, mask=None, weight=None, kind=0, dim=None, keepdim=False):
    if not keepdim:
        reduced = reduced_dims(input.shape, dim)
        grad, origin, scale = (restore_dims(t, reduced) for t in (grad, origin, scale))
    out = torch.empty_like(input)
    if out.numel():
        tensors, slope = (input, origin, mask, weight, grad, scale, out), SLOPES[kind]
        found, addresses = traits(tensors)

        def build(arch):
            check_operands("statistic_backward", *tensors)
            return backward_plan(slope, tensors, out.shape, arch)

        cached_plan((id(slope), found), build, input.device)(tensors, addresses)
    return out

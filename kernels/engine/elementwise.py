"""The kernel that writes one value, or a few, per element: out = keep ? c * w * f(x, y) : 0, or f(x, y, z).

With f a loss and c = 1 it computes a loss that is not reduced. With f its slopes and c = grad / denominator it is the
backward, which writes the gradients of x, y and z. Without operands (f = 1) it is the backward of a sum or a mean.
"""

import torch
import triton
import triton.language as tl

from .indexing import (
    broadcast_strides,
    fuse,
    line,
    memory_order,
    needs_int64,
    sparse_kinds,
    split_inner,
    tile_kinds,
    tile_shape,
)
from .kernel import COMPUTE, Kernel
from .launch import Plan, cached_plan
from .operand import Operand, Space, constants
from .scaling import quotient_apart
from .tensors import check_operands, traits
from .tile import fetch, indices, is_whole, kept, store, within

# SLOPES: what f returns. NONE: values. DIFFERENCE: df/dx of an f that depends on x - y alone, so that df/dy = -df/dx.
# ALL_SLOPES: df/dx, df/dy and, with z, df/dz. FLAT: like ALL_SLOPES, and a slope of 0 gives 0 whatever the upstream
# gradient. SMALL: like ALL_SLOPES, where no slope is large (`f.small`).
NONE, DIFFERENCE, ALL_SLOPES, FLAT, SMALL = (tl.constexpr(i) for i in range(5))


@triton.jit
def scaled(slope, c, power, SCALES: tl.constexpr, APART: tl.constexpr, FLAT: tl.constexpr):
    """c * slope; with APART c * power * slope. FLAT: 0 where the slope is 0, even if c is infinite or NaN."""
    value = slope
    if SCALES:
        value = c * value
    if APART:
        value = value * power
    if FLAT:
        value = tl.where(slope == 0, 0.0, value)
    return value


ElementwiseConfig = constants("F SLOPES BM BN VEC C I")


@triton.jit
def elementwise_tile(
    x, y, z, mask, weight, grad, denominator, out, dy, dz, parameters, space, m, n, config, EDGE: tl.constexpr
):
    C: tl.constexpr = config.C
    SLOPES: tl.constexpr = config.SLOPES
    keep, w = kept(mask, weight, space, m, n, config, EDGE)  # (BM, BN)
    # APART: grad / denominator * w is kept as two factors. In one it may underflow in fp32, where a large slope or
    # weight brings the product back.
    APART: tl.constexpr = (
        denominator is not None and (weight is not None or (x is not None and SLOPES != SMALL)) and C == tl.float32
    )
    one = tl.full([1, 1], 1.0, C)
    c, power = one, one  # c = grad / denominator * w
    if grad is not None:
        c = fetch(grad, space, m, n, keep, EDGE).to(C)
    if denominator is not None:
        by = fetch(denominator, space, m, n, keep, EDGE)
        if APART:
            c, power = quotient_apart(c, by.to(tl.float64))
        else:
            c = c / by.to(C)
    if APART and weight is not None:
        power = power * w.to(C)
    elif weight is not None:
        c = c * w.to(C)
    value = tl.full([config.BM, config.BN], 1.0, C)  # f(x, y, z), or df/dx
    other = value  # df/dy
    third = value  # df/dz
    if x is not None:
        a, b = fetch(x, space, m, n, keep, EDGE).to(C), fetch(y, space, m, n, keep, EDGE).to(C)
        if z is not None:
            d = fetch(z, space, m, n, keep, EDGE).to(C)
            if SLOPES == NONE:
                value *= config.F(a, b, d, *parameters)
            else:
                value, other, third = config.F(a, b, d, *parameters)
        elif SLOPES >= ALL_SLOPES:
            value, other = config.F(a, b, *parameters)
        else:
            value *= config.F(a, b, *parameters)
    SCALES: tl.constexpr = grad is not None or weight is not None
    value = scaled(value, c, power, SCALES, APART, SLOPES == FLAT)
    if SLOPES == DIFFERENCE:
        other = -value
    else:
        other = scaled(other, c, power, SCALES, APART, SLOPES == FLAT)
    # select, do not multiply: the gradient may be NaN where an element is not kept
    inside = within(space, m, n)
    if out is not None:
        store(out, space, m, n, tl.where(keep, value, 0.0), inside, EDGE)
    if dy is not None:
        store(dy, space, m, n, tl.where(keep, other, 0.0), inside, EDGE)
    if dz is not None:
        third = scaled(third, c, power, SCALES, APART, SLOPES == FLAT)
        store(dz, space, m, n, tl.where(keep, third, 0.0), inside, EDGE)


@triton.jit
def elementwise_kernel(
    x: Operand, y: Operand, z: Operand, mask: Operand, weight: Operand, grad: Operand, denominator: Operand,
    out: Operand, dy: Operand, dz: Operand, parameters: tl.float64, space: Space, config: ElementwiseConfig,
):  # fmt: skip
    parameters = tl.tuple([tl.full([1, 1], p, config.C) for p in parameters])
    m0, n0 = tile_corner(space, config)
    m, n = indices(m0, n0, config)
    if config.VEC == 1:
        in_bounds = False
    else:
        in_bounds = is_whole(space, m0, n0, config)
    if in_bounds:
        elementwise_tile(x, y, z, mask, weight, grad, denominator, out, dy, dz, parameters, space, m, n, config, False)
    else:
        elementwise_tile(x, y, z, mask, weight, grad, denominator, out, dy, dz, parameters, space, m, n, config, True)


@triton.jit
def tile_corner(space, config):
    """(first row, first column) of a block's one tile."""
    pid = tl.program_id(0).to(config.I)
    across = (space.N + config.BN - 1) // config.BN
    return pid // across * config.BM, pid % across * config.BN


ELEMENTWISE = Kernel(elementwise_kernel)
OUTPUTS = 3  # the last three operands are outputs
WIDEST = 1024  # columns of a tile with more than one row


def plan(kernel, tensors, outputs, shape, compute, constants, arch=None, sparse=()):
    """A plan of a kernel with one tile for each block.

    tensors: the kernel's operands. The last `outputs` of them have this shape; the others broadcast to it. sparse: the
    indices of small operands, which do not affect the choice of the variant (indexing.sparse_kinds)."""
    lined = line(tensors, shape)
    if not lined:
        strides = [None if t is None else broadcast_strides(t, shape) for t in tensors]
        written, read = strides[-outputs:], strides[:-outputs]
        order = memory_order(shape, (*written, *read))  # outputs first: their memory order decides
        lined = split_inner(fuse(order, shape, strides))
    outer, inner = lined
    dense = [None if i in sparse else t for i, t in enumerate(tensors)]
    kinds, vec = tile_kinds(dense, outer.without(sparse), inner.without(sparse))
    kinds = sparse_kinds(kinds, outer, inner, sparse)
    M, N = outer.numel, inner.numel
    narrowest = min(t.element_size() for t in (*dense[:3], *tensors[-outputs:]) if t is not None)
    BM, BN = tile_shape(M, N, vec, kernel.config(arch).tile(narrowest, vec, dense), WIDEST)
    wide = needs_int64(outer, inner)
    if getattr(constants.get("F"), "small", False):
        constants = constants | {"SLOPES": SMALL.value}
    values = constants | {
        "M": M,
        "N": N,
        "BM": BM,
        "BN": BN,
        "VEC": vec,
        "C": COMPUTE[compute],
        "I": tl.int64 if wide else tl.int32,
    }
    return Plan(
        kernel, tensors, {}, outer, inner, kinds, vec, values, grid=(-(-M // BM) * -(-N // BN), 1), wide=wide, arch=arch
    )


def compute_dtype(*tensors):
    for t in tensors:
        if t is not None and t.dtype == torch.float64:
            return torch.float64
    return torch.float32


def elementwise(name, f, tensors, parameters=(), slopes=NONE):
    """Fills the outputs: the last three of `tensors`, each None or of the full shape. tensors: all operands."""
    outputs = [t for t in tensors[-OUTPUTS:] if t is not None]
    if not outputs or not outputs[0].numel():
        return
    result, addresses = traits(tensors)

    def build(arch):
        check_operands(name, *outputs, *tensors)
        x, y, z, _, weight, grad, *_ = tensors
        compute = compute_dtype(x, y, z, weight, grad, *outputs)
        constants = {"F": f, "SLOPES": slopes.value, "parameters": len(parameters)}
        return plan(ELEMENTWISE, tensors, OUTPUTS, outputs[0].shape, compute, constants, arch)

    launch_plan = cached_plan((id(f), slopes.value, result), build, outputs[0].device)
    launch_plan(tensors, addresses, parameters)

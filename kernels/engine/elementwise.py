"""What writes one value, or a few, per element: out = keep ? c * w * f(x, y) : 0, or f(x, y, z).

With f a loss and c = 1 it is a loss that is not reduced. With f its slopes and c = grad / denominator it is the
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
from .launch import Plan, cached_plan, check_operands, traits
from .scaling import quotient_apart
from .tile import fetch, indices, kept, store, within

# SLOPES: what f is where the kernel writes gradients. FLAT: all slopes, and where one is 0 nothing passes. SMALL: all
# slopes, none of which is large, as such a functor says (`slopes.small = True`).
NONE, DIFFERENCE, ALL_SLOPES, FLAT, SMALL = (tl.constexpr(i) for i in range(5))


@triton.jit
def scaled(slope, c, power, SCALES: tl.constexpr, APART: tl.constexpr, FLAT: tl.constexpr):
    """c slope, where c is APART c power. c may be infinite or NaN where a flat loss has a slope of 0."""
    value = slope
    if SCALES:
        value = c * value
    if APART:
        value = value * power
    if FLAT:
        value = tl.where(slope == 0, 0.0, value)
    return value


@triton.jit
def elementwise_tile(
    space, x, y, z, mask, weight, grad, denominator, out, dy, dz, m, n, parameters,
    F: tl.constexpr, SLOPES: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, MASK: tl.constexpr,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, DENOMINATOR: tl.constexpr, OUT: tl.constexpr, DY: tl.constexpr,
    DZ: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    keep, w = kept(space, mask, weight, m, n, MASK, WEIGHT, BM, BN, EDGE)
    # Of a tiny upstream gradient over a huge divisor, fp32 may have nothing left for a large slope, or weight, to meet.
    APART: tl.constexpr = DENOMINATOR and (WEIGHT or (X and SLOPES != SMALL)) and C == tl.float32
    one = tl.full([1, 1], 1.0, C)
    c, power = one, one
    if GRAD:
        c = fetch(grad, space, m, n, keep, GRAD, EDGE).to(C)
    if DENOMINATOR:
        by = fetch(denominator, space, m, n, keep, DENOMINATOR, EDGE)
        if APART:
            c, power = quotient_apart(c, by.to(tl.float64))
        else:
            c = c / by.to(C)
    if APART and WEIGHT:
        power = power * w.to(C)
    elif WEIGHT:
        c = c * w.to(C)
    value = tl.full([BM, BN], 1.0, C)
    other = value
    third = value
    if X:
        a, b = fetch(x, space, m, n, keep, X, EDGE).to(C), fetch(y, space, m, n, keep, Y, EDGE).to(C)
        if Z:
            d = fetch(z, space, m, n, keep, Z, EDGE).to(C)
            if SLOPES == NONE:
                value *= F(a, b, d, *parameters)
            else:
                value, other, third = F(a, b, d, *parameters)
        elif SLOPES >= ALL_SLOPES:
            value, other = F(a, b, *parameters)
        else:
            value *= F(a, b, *parameters)
    SCALES: tl.constexpr = GRAD or WEIGHT
    value = scaled(value, c, power, SCALES, APART, SLOPES == FLAT)
    if SLOPES == DIFFERENCE:
        other = -value
    else:
        other = scaled(other, c, power, SCALES, APART, SLOPES == FLAT)
    # selected, not multiplied: where nothing is kept the gradient may be NaN
    inside = within(space, m, n)
    if OUT:
        store(out, space, m, n, tl.where(keep, value, 0.0), inside, OUT, EDGE)
    if DY:
        store(dy, space, m, n, tl.where(keep, other, 0.0), inside, DY, EDGE)
    if DZ:
        third = scaled(third, c, power, SCALES, APART, SLOPES == FLAT)
        store(dz, space, m, n, tl.where(keep, third, 0.0), inside, DZ, EDGE)


@triton.jit
def elementwise_kernel(
    x, y, z, mask, weight, grad, denominator, out, dy, dz,
    parameters,
    outer_shape, inner_shape, x_outer, x_inner, y_outer, y_inner, z_outer, z_inner, mask_outer, mask_inner,
    weight_outer, weight_inner, grad_outer, grad_inner, denominator_outer, denominator_inner, out_outer, out_inner,
    dy_outer, dy_inner, dz_outer, dz_inner,
    M, N,
    F: tl.constexpr, SLOPES: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, MASK: tl.constexpr,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, DENOMINATOR: tl.constexpr, OUT: tl.constexpr, DY: tl.constexpr,
    DZ: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    space = (M, N, outer_shape, inner_shape)
    xs, ys, zs = (x, x_outer, x_inner), (y, y_outer, y_inner), (z, z_outer, z_inner)
    masks, ws = (mask, mask_outer, mask_inner), (weight, weight_outer, weight_inner)
    gs, ds = (grad, grad_outer, grad_inner), (denominator, denominator_outer, denominator_inner)
    outs, dys, dzs = (out, out_outer, out_inner), (dy, dy_outer, dy_inner), (dz, dz_outer, dz_inner)
    parameters = tl.tuple([tl.full([1, 1], p, C) for p in parameters])

    m0, n0 = tile_corner(N, BM, BN, I)
    m, n = indices(m0, n0, BM, BN, VEC, I)
    if VEC == 1:
        whole = False
    else:
        whole = (m0 + BM <= M) & (n0 + BN <= N)
    if whole:  # needs no bounds
        elementwise_tile(
            space, xs, ys, zs, masks, ws, gs, ds, outs, dys, dzs, m, n, parameters,
            F, SLOPES, X, Y, Z, MASK, WEIGHT, GRAD, DENOMINATOR, OUT, DY, DZ, BM, BN, C, False,
        )  # fmt: skip
    else:
        elementwise_tile(
            space, xs, ys, zs, masks, ws, gs, ds, outs, dys, dzs, m, n, parameters,
            F, SLOPES, X, Y, Z, MASK, WEIGHT, GRAD, DENOMINATOR, OUT, DY, DZ, BM, BN, C, True,
        )  # fmt: skip


@triton.jit
def tile_corner(N, BM: tl.constexpr, BN: tl.constexpr, I: tl.constexpr):
    """(first row, first column) of a block's one tile."""
    pid = tl.program_id(0).to(I)
    across = (N + BN - 1) // BN
    return pid // across * BM, pid % across * BN


OPERANDS = ("x", "y", "z", "mask", "weight", "grad", "denominator", "out", "dy", "dz")
ELEMENTWISE = Kernel(
    elementwise_kernel,
    pointers=OPERANDS,
    floats=("parameters",),
    operands=OPERANDS,
    tuples=(),
    indices=("M", "N"),
    constants=("F", "SLOPES", *(name.upper() for name in OPERANDS), "BM", "BN", "VEC", "C", "I"),
)
OUTPUTS = 3  # the last of the operands
WIDEST = 1024  # columns of a tile with more than one row


def plan(kernel, tensors, outputs, shape, compute, constants, arch=None, sparse=()):
    """A plan of a kernel with one tile for each block.

    tensors: the kernel's operands, the last `outputs` of which have this shape, the others broadcast to it; sparse: the
    places of those that are small, and do not decide about the variant."""
    lined = line(tensors, shape)
    if not lined:
        strides = [None if t is None else broadcast_strides(t, shape) for t in tensors]
        written, read = strides[-outputs:], strides[:-outputs]
        order = memory_order(shape, (*written, *read))  # written once, so in order of the output
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
    return Plan(kernel, tensors, {}, outer, inner, kinds, vec, values,
                grid=(-(-M // BM) * -(-N // BN), 1), wide=wide, arch=arch)  # fmt: skip


def compute_dtype(*tensors):
    for t in tensors:
        if t is not None and t.dtype == torch.float64:
            return torch.float64
    return torch.float32


def elementwise(name, f, tensors, parameters=(), slopes=NONE):
    """Fill the outputs among `tensors` (in the order of OPERANDS), which have the full shape."""
    outputs = [t for t in tensors[-OUTPUTS:] if t is not None]
    if not outputs or not outputs[0].numel():
        return
    found, addresses = traits(tensors)

    def build(arch):
        check_operands(name, *outputs, *tensors)
        x, y, z, _, weight, grad, *_ = tensors
        compute = compute_dtype(x, y, z, weight, grad, *outputs)
        constants = {"F": f, "SLOPES": slopes.value, "parameters": len(parameters)}
        return plan(ELEMENTWISE, tensors, OUTPUTS, outputs[0].shape, compute, constants, arch)

    made = cached_plan((id(f), slopes.value, found), build, outputs[0].device)
    made(tensors, addresses, parameters)

"""The skeleton of everything that writes one value per element: out = keep ? c * w * f(x - y) : 0.

With f a loss and c = 1 it is a loss that is not reduced; with f its derivative and c = grad / denominator it is the
backward, where the gradient of y is the negative; without x and y (f = 1), the backward of a sum or a mean.

The backward of a statistic (SCALED) is keep ? (grad * scale) * w * f(x, origin) : 0, with one fp64 origin and scale per
output: their product may lie outside the range of fp32 where the gradient does not.
"""

import torch
import triton
import triton.language as tl

from .indexing import (
    address,
    broadcast_strides,
    fetch,
    fuse,
    memory_order,
    needs_int64,
    sparse_kinds,
    split_inner,
    tile_kinds,
    tile_shape,
)
from .launch import COMPUTE, Config, Kernel, Plan, arch_of, cached_plan, check_operands, trait
from .scaling import BEYOND, MARKED, apart

# SCALED: not at all; by a functor that compares, where weights only mask; by one that weights multiply
PLAIN, UNWEIGHTED, BY_WEIGHT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PER_OUTPUT = (1, 4, 5)  # origin, grad and scale in their places among the operands

# An operand is the tuple (pointer, outer strides, inner strides); `space` is (M, N, outer shape, inner shape).


@triton.jit
def store(operand, space, m, n, value, inside, KIND: tl.constexpr, EDGE: tl.constexpr):
    """A gradient too large for the dtype becomes inf, never the largest number: a gradient scaler looks for it."""
    where = address(operand, space, m, n, KIND)
    value = value.to(operand[0].dtype.element_ty)
    if EDGE:
        tl.store(where, value, mask=inside)
    else:
        tl.store(where, value)


@triton.jit
def scaled(
    space, x, origin, grad, scale, w, keep, m, n,
    F: tl.constexpr, X: tl.constexpr, ORIGIN: tl.constexpr, WEIGHT: tl.constexpr, GRAD: tl.constexpr,
    SCALE: tl.constexpr, COMPARES: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """(grad * scale) * w * f(x, origin); in fp64 grad comes last: of a small norm, grad * scale may overflow alone."""
    v = fetch(x, space, m, n, keep, X, EDGE).to(C)
    if ORIGIN:
        o = fetch(origin, space, m, n, keep, ORIGIN, EDGE).to(tl.float64)
    else:
        o = tl.zeros([1, 1], tl.float64)
    c = fetch(grad, space, m, n, keep, GRAD, EDGE).to(tl.float64)
    by = fetch(scale, space, m, n, keep, SCALE, EDGE).to(tl.float64)
    c = tl.where(by == 0, 0.0, c)  # there is no statistic, or it is constant: 0 whatever the gradient
    if C == tl.float64:
        if COMPARES:
            value = F(v, o, tl.zeros([1, 1], C), c * by)
        else:
            value = F(v, o, tl.zeros([1, 1], C), tl.where(by <= MARKED, -by, by))
            if WEIGHT:
                value = value * w
            value = value * tl.where(by <= MARKED, BEYOND, 1.0) * c
    else:
        high = o.to(tl.float32)  # (x - high) - low: to all digits, without fp64 per element
        low = tl.where(tl.abs(o) < float("inf"), o - high.to(tl.float64), 0.0).to(tl.float32)
        c, power = apart(c * by)
        value = F(v, high, low, c)
        if WEIGHT:
            value = value * w  # not c * w: c may be as large as 2^126
        value = value * power
    return value


@triton.jit
def map_tile(
    space, x, y, mask, weight, grad, denominator, out, negative, m, n, p0, p1,
    F: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    GRAD: tl.constexpr, DENOMINATOR: tl.constexpr, OUT: tl.constexpr, NEGATIVE: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    inside = tl.full([BM, BN], True, tl.int1)
    if EDGE:
        inside = (m < space[0])[:, None] & (n < space[1])[None, :]
    keep = inside
    if MASK:
        keep &= fetch(mask, space, m, n, keep, MASK, EDGE)
    if WEIGHT:
        w = fetch(weight, space, m, n, keep, WEIGHT, EDGE)
        if w.dtype != tl.float64:
            w = w.to(tl.float32)
        keep &= w != 0  # weight 0 means masked out; NaN is kept
    value = tl.full([BM, BN], 1.0, C)
    if SCALED:
        WEIGHED: tl.constexpr = WEIGHT and SCALED == BY_WEIGHT
        value *= scaled(
            space, x, y, grad, denominator, w.to(C) if WEIGHED else value, keep, m, n,
            F, X, Y, WEIGHED, GRAD, DENOMINATOR, SCALED == UNWEIGHTED, C, EDGE,
        )  # fmt: skip
    elif X:
        d = fetch(x, space, m, n, keep, X, EDGE).to(C) - fetch(y, space, m, n, keep, Y, EDGE).to(C)
        value *= F(d, p0, p1)
    if SCALED:
        value = value
    elif GRAD:
        c = fetch(grad, space, m, n, keep, GRAD, EDGE).to(C)
        if DENOMINATOR:
            c = c / fetch(denominator, space, m, n, keep, DENOMINATOR, EDGE).to(C)
        if WEIGHT:
            c = c * w.to(C)
        value = c * value
    elif WEIGHT:
        value = w.to(C) * value
    if OUT:
        # selected, not multiplied: where nothing is kept the gradient may be NaN
        store(out, space, m, n, tl.where(keep, value, 0.0), inside, OUT, EDGE)
    if NEGATIVE:
        store(negative, space, m, n, tl.where(keep, -value, 0.0), inside, NEGATIVE, EDGE)


@triton.jit
def map_kernel(
    x, y, mask, weight, grad, denominator, out, negative,
    p0, p1,
    outer_shape, inner_shape, x_outer, x_inner, y_outer, y_inner, mask_outer, mask_inner, weight_outer, weight_inner,
    grad_outer, grad_inner, denominator_outer, denominator_inner, out_outer, out_inner, negative_outer, negative_inner,
    M, N,
    F: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr, GRAD: tl.constexpr,
    DENOMINATOR: tl.constexpr, OUT: tl.constexpr, NEGATIVE: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    space = (M, N, outer_shape, inner_shape)
    xs, ys = (x, x_outer, x_inner), (y, y_outer, y_inner)
    masks, ws = (mask, mask_outer, mask_inner), (weight, weight_outer, weight_inner)
    gs, ds = (grad, grad_outer, grad_inner), (denominator, denominator_outer, denominator_inner)
    outs, negatives = (out, out_outer, out_inner), (negative, negative_outer, negative_inner)
    a, b = tl.full([1, 1], p0, C), tl.full([1, 1], p1, C)

    pid = tl.program_id(0).to(I)
    across = (N + BN - 1) // BN
    m0, n0 = pid // across * BM, pid % across * BN
    m = m0 + tl.arange(0, BM).to(I)
    n = tl.max_contiguous(n0 + tl.arange(0, BN).to(I), VEC)  # 16 bytes of data per access, as in reduction.py
    if VEC == 1:
        whole = False
    else:
        whole = (m0 + BM <= M) & (n0 + BN <= N)
    if whole:  # needs no bounds
        map_tile(
            space, xs, ys, masks, ws, gs, ds, outs, negatives, m, n, a, b,
            F, X, Y, MASK, WEIGHT, GRAD, DENOMINATOR, OUT, NEGATIVE, SCALED, BM, BN, C, False,
        )  # fmt: skip
    else:
        map_tile(
            space, xs, ys, masks, ws, gs, ds, outs, negatives, m, n, a, b,
            F, X, Y, MASK, WEIGHT, GRAD, DENOMINATOR, OUT, NEGATIVE, SCALED, BM, BN, C, True,
        )  # fmt: skip


OPERANDS = ("x", "y", "mask", "weight", "grad", "denominator", "out", "negative")
MAP = Kernel(
    map_kernel,
    pointers=OPERANDS,
    floats=("p0", "p1"),
    operands=OPERANDS,
    tuples=(),
    indices=("M", "N"),
    constants=("F", *(name.upper() for name in OPERANDS), "SCALED", "BM", "BN", "VEC", "C", "I"),
    configs={None: Config()},
)
WIDEST = 1024  # columns of a tile with more than one row


def plan(f, tensors, shape, compute, arch=None, scaled=PLAIN):
    """tensors in the order of OPERANDS; the outputs have this shape, the others broadcast to it."""
    strides = [None if t is None else broadcast_strides(t, shape) for t in tensors]
    order = memory_order(shape, (*strides[6:], *strides[:6]))  # written once, so in order of the output
    outer, inner = split_inner(fuse(order, shape, strides))
    if scaled == PLAIN:
        kinds, vec = tile_kinds(tensors, outer, inner)
    else:
        dense = [None if i in PER_OUTPUT else t for i, t in enumerate(tensors)]
        groups = (
            g._replace(strides=[None if t is None else s for t, s in zip(dense, g.strides)]) for g in (outer, inner)
        )
        kinds, vec = tile_kinds(dense, *groups)
        kinds = sparse_kinds(kinds, outer, inner, PER_OUTPUT)
    M, N = outer.numel, inner.numel
    narrowest = min(t.element_size() for t in (*tensors[:2], *tensors[6:]) if t is not None)
    BM, BN = tile_shape(M, N, vec, MAP.config(arch).tile(narrowest, vec), WIDEST)
    wide = needs_int64(outer, inner)
    values = {
        "M": M,
        "N": N,
        "F": f,
        "SCALED": scaled.value,
        "BM": BM,
        "BN": BN,
        "VEC": vec,
        "C": COMPUTE[compute],
        "I": tl.int64 if wide else tl.int32,
    }
    return Plan(MAP, tensors, {}, outer, inner, kinds, vec, values,
                grid=(-(-M // BM) * -(-N // BN), 1), wide=wide, arch=arch)  # fmt: skip


def launch_map(name, f, tensors, p0, p1, compute, scaled=PLAIN):
    """Fill the outputs among `tensors` (in the order of OPERANDS), which have the full shape."""
    outputs = [t for t in tensors[6:] if t is not None]
    if not outputs or not outputs[0].numel():
        return
    check_operands(name, *outputs, *tensors)
    device, shape = outputs[0].device, outputs[0].shape
    made = cached_plan(
        (f, *map(trait, tensors), compute, scaled.value, device),
        lambda: plan(f, tensors, shape, compute, arch_of(device), scaled),
    )
    made(device, *tensors, float(p0), float(p1))


def map_backward(name, f, x, y, mask, weight, grad, denominator, out, negative, p0, p1):
    tensors = (x, y, mask, weight, grad, denominator, out, negative)
    given = [t.dtype for t in (x, y, weight, grad, out, negative) if t is not None]
    launch_map(name, f, tensors, p0, p1, torch.float64 if torch.float64 in given else torch.float32)


def scaled_backward(name, f, x, origin, mask, weight, grad, scale, out, scaled):
    """The backward of a statistic: origin, grad and scale broadcast over what was reduced."""
    given = [t.dtype for t in (x, weight, grad) if t is not None]
    compute = torch.float64 if torch.float64 in given else torch.float32
    launch_map(name, f, (x, origin, mask, weight, grad, scale, out, None), 0.0, 0.0, compute, scaled)

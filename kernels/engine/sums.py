"""Sums and means of keep ? w * f(x, y, z) : 0 over any dimensions, in one launch.

Tiles are (BM, BN) over an outer and an inner group of dimensions; the inner group holds the one nearest in memory. What
is reduced is the inner group (rows), the outer group (columns) or both, and nothing else differs. Where there are too
few outputs to fill a GPU, the tiles of one output block are split among several blocks, and the last block to finish
adds their partial sums. Each sum is added in a fixed order: results are the same bits in every run, on every number of
multiprocessors.

A lane adds at most FLUSH fp32 numbers in sequence; tl.sum adds lanes as a tree, and all above that is fp64.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from . import tiling
from .blocks import add_partials, is_last
from .buffers import allocator
from .indexing import ALL, INNER, OUTER
from .kernel import COMPUTE, Config, Kernel
from .launch import cached_plan, check_operands, common_shape, traits
from .tile import corner, fetch, indices, kept, offset_of, over_axis, within_lane
from .tiling import FLUSH

# DIVISOR, the second output: the count of kept elements (the sum of their weights), a tensor's or a number's value
BY_COUNT, BY_TENSOR, BY_NUMBER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def add_tile(
    total, weights, count, space, x, y, z, mask, weight, m, n, parameters,
    F: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    keep, w = kept(space, mask, weight, m, n, MASK, WEIGHT, BM, BN, EDGE)
    value = fetch(x, space, m, n, keep, X, EDGE).to(C)
    if Z:
        other, third = fetch(y, space, m, n, keep, Y, EDGE).to(C), fetch(z, space, m, n, keep, Z, EDGE).to(C)
        value = F(value, other, third, *parameters)
    elif Y:
        value = F(value, fetch(y, space, m, n, keep, Y, EDGE).to(C), *parameters)
    if WEIGHT:
        w = w.to(C)
        value = value * w
        weights += within_lane(tl.where(keep, w, 0.0), BM, BN, LM, LN, VEC)
    if EDGE or MASK or WEIGHT:
        value = tl.where(keep, value, 0.0)
    if MASK or WEIGHT:
        count += within_lane(tl.where(keep, 1.0, 0.0), BM, BN, LM, LN, VEC)
    return total + within_lane(value, BM, BN, LM, LN, VEC), weights, count


@triton.jit
def add_tiles(
    first, last, block, space, x, y, z, mask, weight, parameters,
    F: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """Sums, weights and counts of tiles [first, last), at most FLUSH of them; one entry per output."""
    total = tl.zeros([LM, LN], C)
    weights = tl.zeros([LM, LN], C)
    count = tl.zeros([LM, LN], tl.float32)
    for t in range(first, last):
        m0, n0 = corner(space, block, t, AXIS, BM, BN)
        m, n = indices(m0, n0, BM, BN, VEC, I)
        if VEC == 1:
            whole = False
        else:
            whole = (m0 + BM <= space[0]) & (n0 + BN <= space[1])
        if whole:  # needs no bounds
            total, weights, count = add_tile(
                total, weights, count, space, x, y, z, mask, weight, m, n, parameters,
                F, X, Y, Z, MASK, WEIGHT, BM, BN, LM, LN, VEC, C, False,
            )  # fmt: skip
        else:
            total, weights, count = add_tile(
                total, weights, count, space, x, y, z, mask, weight, m, n, parameters,
                F, X, Y, Z, MASK, WEIGHT, BM, BN, LM, LN, VEC, C, True,
            )  # fmt: skip
    return over_axis(total, AXIS), over_axis(weights, AXIS), over_axis(count, AXIS)


@triton.jit
def sum_kernel(
    x, y, z, mask, weight, denominator, out, used, partial, counter,
    divisor, parameters,
    outer_shape, inner_shape, x_outer, x_inner, y_outer, y_inner, z_outer, z_inner, mask_outer, mask_inner,
    weight_outer, weight_inner, out_strides,
    M, N, tiles, splits, per_split, outputs, reduced,
    F: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr,
    AXIS: tl.constexpr, MEAN: tl.constexpr, DIVISOR: tl.constexpr, EMPTY_NAN: tl.constexpr, SPLIT: tl.constexpr,
    LONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    BO: tl.constexpr = BN if AXIS == OUTER else (BM if AXIS == INNER else 1)  # outputs of one block
    block = tl.program_id(0).to(I)
    split = tl.program_id(1).to(I)
    space = (M, N, outer_shape, inner_shape)
    xs, ys, zs = (x, x_outer, x_inner), (y, y_outer, y_inner), (z, z_outer, z_inner)
    masks, ws = (mask, mask_outer, mask_inner), (weight, weight_outer, weight_inner)
    parameters = tl.tuple([tl.full([1, 1], p, C) for p in parameters])

    first = split * per_split
    last = tl.minimum(first + per_split, tiles)
    if LONG:
        total = tl.zeros([BO], tl.float64)
        weights = tl.zeros([BO], tl.float64)
        count = tl.zeros([BO], tl.float64)
        for start in range(first, last, FLUSH):
            some, some_weights, some_count = add_tiles(
                start, tl.minimum(start + FLUSH, last), block, space, xs, ys, zs, masks, ws, parameters,
                F, X, Y, Z, MASK, WEIGHT, AXIS, BM, BN, LM, LN, VEC, C, I,
            )  # fmt: skip
            total += some
            weights += some_weights
            count += some_count
    else:
        total, weights, count = add_tiles(
            first, last, block, space, xs, ys, zs, masks, ws, parameters,
            F, X, Y, Z, MASK, WEIGHT, AXIS, BM, BN, LM, LN, VEC, C, I,
        )  # fmt: skip
    if not (MASK or WEIGHT):
        count = tl.zeros([BO], tl.float64) + reduced

    output = block * BO + tl.arange(0, BO).to(I)
    inside = output < outputs
    finished = True
    if SPLIT:
        size = splits * outputs  # of one array of partials: sums, then counts, then weights
        where = partial + split * outputs + output
        tl.store(where, total, mask=inside)
        if MASK or WEIGHT:
            tl.store(where + size, count, mask=inside)
        if WEIGHT:
            tl.store(where + size * 2, weights, mask=inside)
        finished = is_last(counter + block, splits)
    if finished:
        if SPLIT:
            ARRAYS: tl.constexpr = 3 if WEIGHT else (2 if MASK else 1)
            total, counts, weights = add_partials(partial, splits, output, outputs, BS, BO, ARRAYS)
            if MASK or WEIGHT:
                count = counts
        # value = total (/ divisor), or what stands for nothing kept; in fp64 until the store
        if DIVISOR == BY_TENSOR:
            by = tl.load(denominator).to(tl.float64) + count * 0
        elif DIVISOR == BY_NUMBER:
            by = divisor + count * 0
        elif WEIGHT:
            by = weights
        else:
            by = count
        nothing = count == 0
        if DIVISOR == BY_TENSOR or DIVISOR == BY_NUMBER:
            # it counts the kept of all micro-batches and ranks: it says whether there is nothing, and 0 / inf is 0
            nothing = by == 0
            by = tl.where(nothing, float("inf"), by)
        value = total / by if MEAN else total
        value = tl.where(count > 0, value, 0.0)
        if EMPTY_NAN:
            value = tl.where(nothing, float("nan"), value)
        offset = output
        if AXIS == OUTER:
            offset = offset_of(output, inner_shape, out_strides)
        elif AXIS == INNER:
            offset = offset_of(output, outer_shape, out_strides)
        tl.store(out + offset, value.to(C).to(out.dtype.element_ty), mask=inside)
        tl.store(used + offset, by, mask=inside)


OPERANDS = ("x", "y", "z", "mask", "weight")
SUM = Kernel(
    sum_kernel,
    pointers=(*OPERANDS, "denominator", "out", "used", "partial", "counter"),
    floats=("divisor", "parameters"),
    operands=OPERANDS,
    tuples=("out_strides",),
    indices=("M", "N", "tiles", "splits", "per_split", "outputs", "reduced"),
    constants=("F", "X", "Y", "Z", "MASK", "WEIGHT", "AXIS", "MEAN", "DIVISOR", "EMPTY_NAN", "SPLIT", "LONG",
               "BM", "BN", "BS", "LM", "LN", "VEC", "C", "I"),
    # Three blocks to a multiprocessor, or two. Left alone, the assembler spills a register or two to fit one more;
    # told of a limit it does not.
    configs={None: Config(max_registers=(80, 128))},
)  # fmt: skip


def plan(f, tensors, shape, reduced, dtype, compute, mean, divisor, empty_nan, count=0, arch=None, policy=None):
    """tensors: x, y, z, mask, weight; reduced: a bool per dimension; divisor: (DIVISOR, dtype of the tensor); count: of
    parameters."""
    _, y, _, mask, weight = tensors
    arrays = 1 + (mask is not None or weight is not None) + (weight is not None)
    at_once = 2 if compute == torch.float64 else 1  # whose lanes' sums take twice the registers
    made = tiling.cut(SUM, tensors, 3, shape, reduced, arrays, arch, policy, at_once)
    M, N = made.outer.numel, made.inner.numel
    values = {
        "F": f,
        "MEAN": mean,
        "DIVISOR": divisor[0],
        "EMPTY_NAN": empty_nan,
        "C": COMPUTE[compute],
        "parameters": count,
        "reduced": {OUTER.value: M, INNER.value: N, ALL.value: M * N}[made.values["AXIS"]],
    }
    planned = made.plan(SUM, tensors, {"denominator": divisor[1], "out": dtype, "used": torch.float64}, values, arch)
    if y is None and weight is None:  # little to hold but the partials: more blocks, for as many bytes in flight
        columns = made.values["AXIS"] == OUTER.value and tensors[0].element_size() == 2
        few = 56 if columns else 48  # (of eight columns 48 spill)
        planned.config = replace(planned.config, max_registers=(40 if compute == torch.float64 else few, 128))
    return planned


def weighted_sum(
    name, f, operands, mask, weight, denominator, divisor, dim, keepdim, mean, parameters, empty_nan, dtype=None
):
    """(value, divisor) of the sum or mean over `dim` (None or (): all) of keep ? w * f(*operands, *parameters) : 0, or
    of keep ? w * x : 0 where x is the only one. dtype: None is fp64 where an operand is, and else fp32."""
    x, y, z = operands = (*operands, None, None)[:3]
    tensors = x, y, z, mask, weight, denominator
    dim = tuple(dim) if dim else ()
    found, addresses = traits(tensors)
    key = (id(f), found, divisor is None, dim, keepdim, mean, empty_nan, dtype, tiling.POLICY)

    def build(arch):
        check_operands(name, *tensors)
        shape = common_shape(*(t for t in operands if t is not None))
        reduced = tiling.reduced_dims(shape, dim)
        wide = torch.float64 in [t.dtype for t in operands if t is not None]
        result = dtype or (torch.float64 if wide else torch.float32)
        wide = wide or result == torch.float64 or weight is not None and weight.dtype == torch.float64
        compute = torch.float64 if wide else torch.float32
        given = None if denominator is None else denominator.dtype
        by = BY_TENSOR if given else BY_COUNT if divisor is None else BY_NUMBER
        made = plan(f, tensors[:-1], shape, reduced, result, compute, mean, (by.value, given), empty_nan,
                    len(parameters), arch)  # fmt: skip
        out_shape = tiling.reduced_shape(shape, reduced, keepdim)
        made.outputs = [allocator(out_shape, kind, device) for kind in (result, torch.float64)]
        return made

    device = x.device
    made = cached_plan(key, build, device)
    out, used = [make() for make in made.outputs]
    if out.numel():
        number = 1.0 if divisor is None else float(divisor)
        made((*tensors, out, used, *tiling.workspace(made, device)), addresses, number, parameters)
    return out, used

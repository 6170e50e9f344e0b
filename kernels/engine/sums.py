"""Sums and means of keep ? w * f(x, y, z) : 0 over any dimensions, in one launch.

Tiles are (BM, BN) over an outer and an inner group of dimensions. The inner group holds the dimension nearest in
memory. The kernel reduces the inner group (rows), the outer group (columns) or both: AXIS is the only difference. Where
outputs are too few to fill a GPU, several blocks split the tiles of one output block, and the last block to finish adds
their partial sums. Each sum has a fixed order: its bits do not depend on the run, nor on the number of multiprocessors.

A lane adds at most FLUSH fp32 numbers in sequence; tl.sum adds lanes as a tree; all sums above that are fp64.
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
from .launch import cached_plan
from .operand import Operand, Parts, Space, constants
from .tensors import check_operands, common_shape, traits
from .tile import corner, fetch, indices, is_whole, kept, output_offset, over_axis, within_lane
from .tiling import FLUSH

# DIVISOR: what a mean divides by, and the second output holds. BY_COUNT: the count of kept elements or, with weights,
# the sum of the kept weights. BY_TENSOR: the value of the tensor `denominator`. BY_NUMBER: `divisor`.
BY_COUNT, BY_TENSOR, BY_NUMBER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


SumConfig = constants("F FINISH AXIS MEAN DIVISOR EMPTY_NAN SPLIT LONG BM BN BS LM LN VEC C I")


@triton.jit
def add_tile(total, weights, count, x, y, z, mask, weight, parameters, space, m, n, config, EDGE: tl.constexpr):
    C: tl.constexpr = config.C
    keep, w = kept(mask, weight, space, m, n, config, EDGE)  # (BM, BN)
    value = fetch(x, space, m, n, keep, EDGE).to(C)
    if z is not None:
        other, third = fetch(y, space, m, n, keep, EDGE).to(C), fetch(z, space, m, n, keep, EDGE).to(C)
        value = config.F(value, other, third, *parameters)
    elif y is not None:
        value = config.F(value, fetch(y, space, m, n, keep, EDGE).to(C), *parameters)
    if weight is not None:
        w = w.to(C)
        value = value * w
        weights += within_lane(tl.where(keep, w, 0.0), config)
    SOME: tl.constexpr = mask is not None or weight is not None
    if EDGE or SOME:
        value = tl.where(keep, value, 0.0)
    if SOME:
        count += within_lane(tl.where(keep, 1.0, 0.0), config)
    return total + within_lane(value, config), weights, count  # (LM, LN) each


@triton.jit
def add_tiles(first, last, block, x, y, z, mask, weight, parameters, space, config):
    """Returns (sums, sums of weights, counts) over tiles [first, last), at most FLUSH tiles: one entry per output."""
    total = tl.zeros([config.LM, config.LN], config.C)
    weights = tl.zeros([config.LM, config.LN], config.C)
    count = tl.zeros([config.LM, config.LN], tl.float32)
    for t in range(first, last):
        m0, n0 = corner(space, block, t, config)
        m, n = indices(m0, n0, config)
        if config.VEC == 1:
            in_bounds = False
        else:
            in_bounds = is_whole(space, m0, n0, config)
        if in_bounds:
            total, weights, count = add_tile(
                total, weights, count, x, y, z, mask, weight, parameters, space, m, n, config, False
            )
        else:
            total, weights, count = add_tile(
                total, weights, count, x, y, z, mask, weight, parameters, space, m, n, config, True
            )
    return over_axis(total, config), over_axis(weights, config), over_axis(count, config)  # (BO,) each


@triton.jit
def sum_kernel(
    x: Operand, y: Operand, z: Operand, mask: Operand, weight: Operand, denominator: tl.pointer_type,
    out: tl.pointer_type, used: tl.pointer_type, partial: tl.pointer_type, counter: tl.pointer_type,
    divisor: tl.float64, parameters: tl.float64, reduced: tl.tensor, space: Space, parts: Parts, config: SumConfig,
):  # fmt: skip
    """out = sum keep w f(x, y, z) over the inner group, the outer group or both. A mean divides it by `used`. FINISH: a
    functor that makes both outputs from the sum and the count."""
    AXIS: tl.constexpr = config.AXIS
    BO: tl.constexpr = config.BN if AXIS == OUTER else (config.BM if AXIS == INNER else 1)  # outputs of one block
    SOME: tl.constexpr = mask is not None or weight is not None
    block = tl.program_id(0).to(config.I)
    split = tl.program_id(1).to(config.I)
    parameters = tl.tuple([tl.full([1, 1], p, config.C) for p in parameters])

    first = split * parts.per_split
    last = tl.minimum(first + parts.per_split, parts.tiles)
    if config.LONG:
        total = tl.zeros([BO], tl.float64)
        weights = tl.zeros([BO], tl.float64)
        count = tl.zeros([BO], tl.float64)
        for start in range(first, last, FLUSH):
            more, more_weights, more_count = add_tiles(
                start, tl.minimum(start + FLUSH, last), block, x, y, z, mask, weight, parameters, space, config
            )
            total += more
            weights += more_weights
            count += more_count
    else:
        total, weights, count = add_tiles(first, last, block, x, y, z, mask, weight, parameters, space, config)
    if not SOME:
        count = tl.zeros([BO], tl.float64) + reduced

    output = block * BO + tl.arange(0, BO).to(config.I)  # (BO,)
    inside = output < parts.outputs
    finished = True
    if config.SPLIT:
        size = parts.splits * parts.outputs  # elements of one array of partials; the arrays are sums, counts, weights
        pointer = partial + split * parts.outputs + output
        tl.store(pointer, total, mask=inside)
        if SOME:
            tl.store(pointer + size, count, mask=inside)
        if weight is not None:
            tl.store(pointer + size * 2, weights, mask=inside)
        finished = is_last(counter + block, parts.splits)
    if finished:
        if config.SPLIT:
            ARRAYS: tl.constexpr = 3 if weight is not None else (2 if mask is not None else 1)
            total, counts, weights = add_partials(partial, parts.splits, output, parts.outputs, config.BS, BO, ARRAYS)
            if SOME:
                count = counts
        # value = total or total / by, 0 or NaN where nothing is kept; in fp64 until the store
        if config.DIVISOR == BY_TENSOR:
            by = tl.load(denominator).to(tl.float64) + count * 0
        elif config.DIVISOR == BY_NUMBER:
            by = divisor + count * 0
        elif weight is not None:
            by = weights
        else:
            by = count
        nothing = count == 0
        if config.DIVISOR == BY_TENSOR or config.DIVISOR == BY_NUMBER:
            # `by` may count the kept elements of all micro-batches and ranks: 0 means that none has any. 0 / inf is 0.
            nothing = by == 0
            by = tl.where(nothing, float("inf"), by)
        value = total / by if config.MEAN else total
        if config.FINISH is not None:
            value, by = config.FINISH(total, count)
        value = tl.where(count > 0, value, 0.0)
        if config.EMPTY_NAN:
            value = tl.where(nothing, float("nan"), value)
        offset = output_offset(output, space, parts, config)
        tl.store(out + offset, value.to(config.C).to(out.dtype.element_ty), mask=inside)
        tl.store(used + offset, by, mask=inside)


SUM = Kernel(
    sum_kernel,
    # 80 registers allow three blocks per multiprocessor (vector accesses), 128 two. Without a limit the assembler
    # spills a register or two to fit one more block; with a limit it does not.
    {None: Config(max_registers=(80, 128))},
)


def plan(
    f, tensors, shape, reduced, dtype, compute, mean, divisor, empty_nan, count=0, arch=None, policy=None, finish=None
):
    """tensors: x, y, z, mask, weight. reduced: a bool per dimension. divisor: (a DIVISOR, the dtype of the tensor or
    None). count: how many parameters f takes."""
    _, y, _, mask, weight = tensors
    arrays = 1 + (mask is not None or weight is not None) + (weight is not None)
    at_once = 2 if compute == torch.float64 else 1  # fp64 sums of lanes take twice the registers
    narrow = y is None and weight is None and compute == torch.float32
    cut = tiling.cut(SUM, tensors, 3, shape, reduced, arrays, arch, policy, at_once, narrow=narrow)
    M, N = cut.outer.numel, cut.inner.numel
    values = {
        "F": f,
        "FINISH": finish,
        "MEAN": mean,
        "DIVISOR": divisor[0],
        "EMPTY_NAN": empty_nan,
        "C": COMPUTE[compute],
        "parameters": count,
        "reduced": {OUTER.value: M, INNER.value: N, ALL.value: M * N}[cut.values["AXIS"]],
    }
    planned = cut.plan(SUM, tensors, {"denominator": divisor[1], "out": dtype, "used": torch.float64}, values, arch)
    if y is None and weight is None:  # few registers: more blocks fit, for enough bytes in flight
        columns = cut.values["AXIS"] == OUTER.value and tensors[0].element_size() == 2
        few = 64 if columns else 48  # 48 spill where a thread has eight columns
        planned.config = replace(planned.config, max_registers=(40 if compute == torch.float64 else few, 128))
    return planned


def weighted_sum(
    name, f, operands, mask, weight, denominator, divisor, dim, keepdim, mean, parameters, empty_nan, dtype=None,
    finish=None,
):  # fmt: skip
    """Returns (value, divisor): the sum or mean of keep ? w * f(*operands, *parameters) : 0 over `dim` (None or ():
    all). With a single operand x, f is not used: the terms are keep ? w * x : 0. dtype: None means fp64 if an operand
    is fp64, else fp32. finish: a functor that makes both results from the sum and the count; all is fp64 then."""
    x, y, z = operands = (*operands, None, None)[:3]
    tensors = x, y, z, mask, weight, denominator
    dim = tuple(dim) if dim else ()
    results, addresses = traits(tensors)
    key = (id(f), results, divisor is None, dim, keepdim, mean, empty_nan, dtype, id(finish), tiling.POLICY)

    def build(arch):
        check_operands(name, *tensors)
        shape = common_shape(*(t for t in operands if t is not None))
        reduced = tiling.reduced_dims(shape, dim)
        wide = torch.float64 in [t.dtype for t in operands if t is not None]
        result = dtype or (torch.float64 if wide else torch.float32)
        wide = wide or torch.float64 in (result, weight is not None and weight.dtype) or finish is not None
        compute = torch.float64 if wide else torch.float32
        divisor_dtype = None if denominator is None else denominator.dtype
        by = BY_TENSOR if divisor_dtype else BY_COUNT if divisor is None else BY_NUMBER
        options = mean, (by.value, divisor_dtype), empty_nan, len(parameters), arch
        launch_plan = plan(f, tensors[:-1], shape, reduced, result, compute, *options, finish=finish)
        out_shape = tiling.reduced_shape(shape, reduced, keepdim)
        launch_plan.outputs = [allocator(out_shape, kind, device) for kind in (result, torch.float64)]
        return launch_plan

    device = x.device
    launch_plan = cached_plan(key, build, device)
    out, used = [make() for make in launch_plan.outputs]
    if out.numel():
        number = 1.0 if divisor is None else float(divisor)
        launch_plan((*tensors, out, used, *tiling.workspace(launch_plan, device)), addresses, number, parameters)
    return out, used

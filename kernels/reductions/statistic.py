"""Statistics: elements are added to a state (engine/accumulate.py), and the state is turned into a value and into what
the backward needs, an origin and a scale.

A statistic has a functor of the state, whose entries are fp64:

    finish(state, by, parameter) -> (value, origin, scale, whether there is a result)

by: the count of kept elements, or the sum of their weights. For a state without elements its results are not used.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..engine import tiling
from ..engine.accumulate import add_range
from ..engine.blocks import is_last
from ..engine.buffers import allocator
from ..engine.indexing import INNER, OUTER, tile_shape
from ..engine.kernel import COMPUTE, Config, Kernel
from ..engine.launch import cached_plan
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.state import (
    ABSOLUTE,
    ARRAYS,
    COUNT,
    MOMENTS,
    MOST_ARRAYS,
    SQUARES,
    merge_partials,
    store_state,
)
from ..engine.tensors import check_operands, traits
from ..engine.tile import output_offset


@triton.jit
def largest_of(dtype: tl.constexpr):
    """The largest finite number of dtype, in fp64: (1,)."""
    if dtype == tl.float16:
        most = tl.full([1], 65504.0, tl.float64)
    elif dtype == tl.bfloat16:
        most = tl.full([1], 3.3895313892515355e38, tl.float64)
    elif dtype == tl.float32:
        most = tl.full([1], 3.4028234663852886e38, tl.float64)
    else:
        most = tl.full([1], 1.7976931348623157e308, tl.float64)
    return most


StatisticConfig = constants("MODE FINISH ABS NEGATE SATURATE AXIS EMPTY_NAN SPLIT LONG BM BN BS LM LN VEC C I")


@triton.jit
def write(state, out, origin, scale, offset, inside, parameter, config, WEIGHED: tl.constexpr):
    """Stores value, origin and scale, (BO,) each, in fp64 until the store. A COUNT stores the value alone."""
    count, weights, pivot, shift, maximum, total = state
    pivot, maximum = pivot.to(tl.float64), maximum.to(tl.float64)
    state = count, weights, pivot, shift, maximum, total
    if config.FINISH is None:
        tl.store(out + offset, count.to(tl.int64), mask=inside)
    else:
        value, center, factor, exists = config.FINISH(state, weights if WEIGHED else count, parameter)
        if config.SATURATE:
            most = largest_of(out.dtype.element_ty)
            over = (value > most) & (total < float("inf")) & (tl.abs(maximum) < float("inf"))  # no element is inf
            value = tl.where(over, most, value)
            factor = tl.where(over, 0.0, factor)
        value = tl.where(exists, value, float("nan") if config.EMPTY_NAN else 0.0)
        tl.store(out + offset, value.to(config.C).to(out.dtype.element_ty), mask=inside)
        tl.store(origin + offset, tl.where(count > 0, center, 0.0), mask=inside)
        tl.store(scale + offset, tl.where(exists, factor, 0.0), mask=inside)


@triton.jit
def statistic_kernel(
    x: Operand, mask: Operand, weight: Operand, out: tl.pointer_type, origin: tl.pointer_type, scale: tl.pointer_type,
    partial: tl.pointer_type, counter: tl.pointer_type, parameter: tl.float64, space: Space, parts: Parts,
    config: StatisticConfig,
):  # fmt: skip
    MODE: tl.constexpr = config.MODE
    AXIS: tl.constexpr = config.AXIS
    BO: tl.constexpr = config.BN if AXIS == OUTER else (config.BM if AXIS == INNER else 1)  # outputs of one block
    WEIGHT: tl.constexpr = weight is not None
    WEIGHED: tl.constexpr = WEIGHT and (MODE == SQUARES or MODE == MOMENTS)
    block = tl.program_id(0).to(config.I)
    split = tl.program_id(1).to(config.I)

    first = split * parts.per_split
    last = tl.minimum(first + parts.per_split, parts.tiles)
    state = add_range(first, last, block, x, mask, weight, space, config, MODE, config.ABS, config.NEGATE)  # (BO,) each

    output = block * BO + tl.arange(0, BO).to(config.I)
    inside = output < parts.outputs
    finished = True
    if config.SPLIT:
        pointer = partial + split * parts.outputs + output
        store_state(pointer, parts.splits * parts.outputs, inside, state, MODE, WEIGHT)
        finished = is_last(counter + block, parts.splits)
    if finished:
        if config.SPLIT:
            splits = parts.splits
            state = merge_partials(
                partial, splits, output, parts.outputs, splits, MODE, WEIGHT, config.BS, BO, config.C
            )
        offset = output_offset(output, space, parts, config)
        write(state, out, origin, scale, offset, inside, parameter, config, WEIGHED)


STATISTIC = Kernel(statistic_kernel, {None: Config(tile_bytes=16384)})


def plan(mode, finish, tensors, shape, reduced, dtype, compute, *, absolute=False, negate=False, saturate=False,
         empty_nan=False, arch=None, policy=None):  # fmt: skip
    """tensors: x, mask, weight; reduced: a bool per dimension."""
    arrays = MOST_ARRAYS if tensors[2] is not None and mode in (SQUARES, MOMENTS) else ARRAYS[mode]
    x, mask, weight = tensors
    light = weight is None and compute == torch.float32
    policy = policy or tiling.POLICY
    if mode in (COUNT, MOMENTS):  # COUNT reads little, MOMENTS gathers much
        policy = policy._replace(blocks=policy.blocks // 2, partials=policy.partials * (2 if mode is COUNT else 1))
    at_once = 1 if light and mode is not MOMENTS else 2

    def tile_of(axis, M, N, vec, elements):
        """Half a tile if weights, states of several rows, or addresses of single elements take registers, too."""
        crowded = vec == 1 or weight is not None or axis is INNER and M > 1
        widest = policy.widest_kept if axis is OUTER else policy.widest
        return tile_shape(M, N, vec, elements // 2 if crowded else elements, widest)

    cut = tiling.cut(STATISTIC, tensors, 1, shape, reduced, arrays, arch, policy, at_once, tile_of=tile_of)
    values = {
        "MODE": mode.value,
        "FINISH": finish,
        "ABS": absolute,
        "NEGATE": negate,
        "SATURATE": saturate,
        "EMPTY_NAN": empty_nan,
        "C": COMPUTE[compute],
    }
    stat_dtype = None if mode is COUNT else torch.float64
    planned = cut.plan(STATISTIC, tensors, {"out": dtype, "origin": stat_dtype, "scale": stat_dtype}, values, arch)
    across = cut.values["AXIS"] == OUTER.value
    rows = cut.values["BM"] > 1
    of_rows = cut.values["SPLIT"] and rows  # the last block gathers states of several rows
    registers = 80 if across or mode is MOMENTS and not rows else 64
    if mode is MOMENTS and not across and not rows and mask is not None and x.element_size() == 2:
        registers = 88  # (80 spill on sm_120)
    if not light or cut.wide or mode is not COUNT and (x.element_size() == 2 if across else of_rows):
        registers = 128
    planned.config = replace(planned.config, max_registers=(registers, 128))
    return planned


def statistic(name, mode, finish, input, mask, weight, dim, keepdim, empty_nan=False, dtype=None, parameter=0.0, *,
              absolute=False, negate=False, saturate=False):  # fmt: skip
    """Returns (value, origin, scale) over `dim` (None or (): all); for a COUNT, which reads no input, the value."""
    counting = mode is COUNT
    if counting:
        dtype = torch.int64
    elif dtype is None:
        dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    x = None if counting else input  # a count's input has any dtype
    inputs = [t for t in (x, mask, weight) if t is not None]
    dim, device = tuple(dim) if dim else (), inputs[0].device
    result, addresses = traits((x, mask, weight))
    key = (mode.value, id(finish), input.shape, result, dim, keepdim, empty_nan, dtype, absolute, negate, saturate,
           tiling.POLICY)  # fmt: skip

    def build(arch):
        check_operands(name, *inputs)
        reduced = tiling.reduced_dims(input.shape, dim)
        # A sum of |x| that must saturate is added in fp64, where finite fp32 elements do not overflow: an infinite sum
        # then has an infinite element.
        wide = saturate and mode is ABSOLUTE or torch.float64 in (dtype, *(t.dtype for t in inputs))
        launch_plan = plan(
            mode, finish, (x, mask, weight), input.shape, reduced, dtype, torch.float64 if wide else torch.float32,
            absolute=absolute, negate=negate, saturate=saturate, empty_nan=empty_nan, arch=arch,
        )  # fmt: skip
        out_shape = tiling.reduced_shape(input.shape, reduced, keepdim)
        kinds = (dtype,) if counting else (dtype, torch.float64, torch.float64)
        launch_plan.outputs = [allocator(out_shape, kind, device) for kind in kinds]
        return launch_plan

    launch_plan = cached_plan(key, build, device)
    out, origin, scale = results = ([make() for make in launch_plan.outputs] + [None, None])[:3]
    if out.numel():
        tensors = x, mask, weight, out, origin, scale, *tiling.workspace(launch_plan, device)
        launch_plan(tensors, addresses, float(parameter))
    return out if counting else tuple(results)


def launcher(name, mode, finish, **options):
    """The launcher of `_<name>`, with the arguments of its schema."""

    def launch(input, mask=None, weight=None, dim=None, keepdim=False, empty_nan=False, dtype=None, parameter=0.0):
        return statistic(name, mode, finish, input, mask, weight, dim, keepdim, empty_nan, dtype, parameter, **options)

    launch.__name__ = launch.__qualname__ = name
    return launch

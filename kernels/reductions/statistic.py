"""The kernel of the statistics: folds elements to a state (folding.py), and makes of it a value and what the backward
needs: an origin and a scale.
"""

import triton
import triton.language as tl

from ..engine.folding import MOMENTS, SQUARES, fold_range, gather, leave, square
from ..engine.indexing import spread
from ..engine.launch import Config, Kernel
from ..engine.reduction import INNER, OUTER
from ..engine.scaling import inverse_beyond, reciprocal

# RESULT: what is made of a state
COUNT, ABSOLUTE_SUM, SQUARE_SUM, NORM, RMS, LOGSUMEXP, LARGEST, VAR, STD = map(tl.constexpr, range(9))


@triton.jit
def largest_of(dtype: tl.constexpr):
    """The largest finite number, in fp64."""
    if dtype == tl.float16:
        most = tl.full([1], 65504.0, tl.float64)
    elif dtype == tl.bfloat16:
        most = tl.full([1], 3.3895313892515355e38, tl.float64)
    elif dtype == tl.float32:
        most = tl.full([1], 3.4028234663852886e38, tl.float64)
    else:
        most = tl.full([1], 1.7976931348623157e308, tl.float64)
    return most


@triton.jit
def finish(
    count, weights, pivot, shift, top, total, out, origin, scale, offset, inside, parameter,
    RESULT: tl.constexpr, NEGATE: tl.constexpr, SATURATE: tl.constexpr, WEIGHT: tl.constexpr, EMPTY_NAN: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """value, and what the backward needs of it, in fp64 until the store."""
    if RESULT == COUNT:
        tl.store(out + offset, count.to(tl.int64), mask=inside)
    else:
        by = weights if WEIGHT else count
        some = count > 0
        center = count * 0  # origin
        if RESULT == SQUARE_SUM:
            value = total * top * top
            factor = count * 0 + 2.0
        elif RESULT == ABSOLUTE_SUM:
            value = total
            factor = count * 0 + 1.0
        elif RESULT == NORM:
            root = tl.sqrt(total)
            value, factor = root * top, inverse_beyond(root, top)
        elif RESULT == RMS:
            root = tl.sqrt(total / by)
            value, factor = root * top, inverse_beyond(root * by, top)
        elif RESULT == LOGSUMEXP:
            total = tl.where(total < 0, float("nan"), total)  # has no logarithm, and no slope
            value = top + tl.log(total)
            center = tl.where(total == 0, 0.0, top)  # so that exp(x - origin) is 0 for x = -inf
            factor = 1 / tl.where(total == 0, 1.0, total)
        elif RESULT == LARGEST:
            value = tl.where(shift > 0, float("nan"), -top if NEGATE else top)
            center = value
            factor = 1 / tl.where(shift > 0, shift, total)
        else:  # sum w (x - mean)^2 = sum w (x - p)^2 - (sum w (x - p))^2 / sum w
            center = pivot + shift / by
            spread_out = total - square(shift * reciprocal(top)) / by
            spread_out = tl.where(spread_out < 0, 0.0, spread_out)
            by = by - parameter
            some = some & ~((by <= 0) & (spread_out == spread_out))  # what is not finite shows
            if RESULT == VAR:
                value = spread_out / by * top * top
                factor = tl.where(value != value, value, 2 / by)  # a kept inf: the whole gradient is NaN
            else:
                root = tl.sqrt(spread_out / by)
                value, factor = root * top, inverse_beyond(root * by, top)
        if SATURATE:
            most = largest_of(out.dtype.element_ty)
            over = (value > most) & ((value if RESULT == LARGEST else total) < float("inf"))  # of finite elements
            value = tl.where(over, most, value)
            factor = tl.where(over, 0.0, factor)
        value = tl.where(some, value, float("nan") if EMPTY_NAN else 0.0)
        tl.store(out + offset, value.to(C).to(out.dtype.element_ty), mask=inside)
        tl.store(origin + offset, tl.where(count > 0, center, 0.0), mask=inside)
        tl.store(scale + offset, tl.where(some, factor, 0.0), mask=inside)


@triton.jit
def fold_kernel(
    x, mask, weight, out, origin, scale, partial, counter,
    parameter,
    outer_shape, inner_shape, x_outer, x_inner, mask_outer, mask_inner, weight_outer, weight_inner, out_strides,
    M, N, tiles, splits, per_split, outputs,
    MODE: tl.constexpr, RESULT: tl.constexpr, ABS: tl.constexpr, NEGATE: tl.constexpr, SATURATE: tl.constexpr,
    X: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr, AXIS: tl.constexpr, EMPTY_NAN: tl.constexpr,
    SPLIT: tl.constexpr, LONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    FOLD: tl.constexpr, GROUP: tl.constexpr, VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    BO: tl.constexpr = BN if AXIS == OUTER else (BM if AXIS == INNER else 1)  # outputs of one block
    WEIGHED: tl.constexpr = WEIGHT and (MODE == SQUARES or MODE == MOMENTS)
    block = tl.program_id(0).to(I)
    split = tl.program_id(1).to(I)
    space = (M, N, outer_shape, inner_shape)
    xs, masks, ws = (x, x_outer, x_inner), (mask, mask_outer, mask_inner), (weight, weight_outer, weight_inner)

    first = split * per_split
    count, weights, pivot, shift, top, total = fold_range(
        first, tl.minimum(first + per_split, tiles), block, space, xs, masks, ws,
        MODE, ABS, NEGATE, X, MASK, WEIGHT, AXIS, BM, BN, FOLD, GROUP, VEC, C, I, LONG,
    )  # fmt: skip

    kept = block * BO + tl.arange(0, BO).to(I)
    inside = kept < outputs
    if AXIS == OUTER:
        offset = spread(kept, inner_shape, out_strides)
    elif AXIS == INNER:
        offset = spread(kept, outer_shape, out_strides)
    else:
        offset = kept
    if SPLIT:
        where = partial + split * outputs + kept
        leave(where, splits * outputs, inside, count, weights, pivot, shift, top, total, MODE, WEIGHED)
        # All threads' partials come before the count (barrier, release), and the count before the last block's
        # reads (acquire): who counts last sees every partial.
        tl.debug_barrier()
        done = tl.atomic_add(counter + block, 1, sem="acq_rel", scope="gpu")
        if done == splits - 1:
            count, weights, pivot, shift, top, total = gather(partial, splits, kept, outputs, MODE, WEIGHT, BS, BO, C)
            finish(
                count, weights, pivot, shift, top, total, out, origin, scale, offset, inside, parameter,
                RESULT, NEGATE, SATURATE, WEIGHED, EMPTY_NAN, C,
            )  # fmt: skip
            tl.store(counter + block, 0)  # as the next launch on this stream expects it
    else:
        finish(
            count, weights, pivot, shift, top, total, out, origin, scale, offset, inside, parameter,
            RESULT, NEGATE, SATURATE, WEIGHED, EMPTY_NAN, C,
        )  # fmt: skip


OPERANDS = ("x", "mask", "weight")
FOLDING = Kernel(
    fold_kernel,
    pointers=(*OPERANDS, "out", "origin", "scale", "partial", "counter"),
    floats=("parameter",),
    operands=OPERANDS,
    tuples=("out_strides",),
    indices=("M", "N", "tiles", "splits", "per_split", "outputs"),
    constants=("MODE", "RESULT", "ABS", "NEGATE", "SATURATE", "X", "MASK", "WEIGHT", "AXIS", "EMPTY_NAN", "SPLIT",
               "LONG", "BM", "BN", "BS", "FOLD", "GROUP", "VEC", "C", "I"),
    configs={None: Config(max_registers=(80, 128))},  # as REDUCE's: left alone, the assembler spills to fit one more
)  # fmt: skip

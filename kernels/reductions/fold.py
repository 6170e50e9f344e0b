"""How a statistic is launched: value, and the origin and the scale with which its backward is one map."""

from dataclasses import replace

import torch

from ..engine import reduce as reducing
from ..engine.folding import ABSOLUTE, COUNTING, EXPONENTIAL, EXTREME, MOMENTS, SQUARES
from ..engine.launch import COMPUTE, Plan, arch_of, cached_plan, check_operands, trait
from ..engine.reduction import OUTER
from .statistic import ABSOLUTE_SUM, COUNT, FOLDING, LARGEST, LOGSUMEXP, NORM, RMS, SQUARE_SUM, STD, VAR

MODE = {
    COUNT: COUNTING,
    ABSOLUTE_SUM: ABSOLUTE,
    SQUARE_SUM: SQUARES,
    NORM: SQUARES,
    RMS: SQUARES,
    LOGSUMEXP: EXPONENTIAL,
    LARGEST: EXTREME,
    VAR: MOMENTS,
    STD: MOMENTS,
}
ARRAYS = {COUNTING: 1, ABSOLUTE: 2, SQUARES: 3, EXPONENTIAL: 3, EXTREME: 4, MOMENTS: 5}  # of partials
AT_ONCE = 4  # arrays of which a block holds a partial, beside what it computes
MORE_REGISTERS = (128, 128)
WEIGHED = 6  # SQUARES and MOMENTS with weights


def plan(result, tensors, shape, reduced, dtype, compute, *, absolute=False, negate=False, saturate=False,
         empty_nan=False, arch=None, policy=None):  # fmt: skip
    """tensors: x, mask, weight; reduced: a bool per dimension."""
    mode = MODE[result]
    arrays = WEIGHED if tensors[2] is not None and mode in (SQUARES, MOMENTS) else ARRAYS[mode]
    made = reducing.cut(FOLDING, tensors, 1, shape, reduced, arrays, arch, policy, AT_ONCE)
    values = made.values | {
        "MODE": mode.value,
        "RESULT": result.value,
        "ABS": absolute or mode is ABSOLUTE,
        "NEGATE": negate,
        "SATURATE": saturate,
        "EMPTY_NAN": empty_nan,
        "C": COMPUTE[compute],
    }
    wide = None if mode is COUNTING else torch.float64
    dtypes = {"out": dtype, "origin": wide, "scale": wide} | reducing.scratch(made.values)
    planned = Plan(FOLDING, tensors, dtypes, made.outer, made.inner, made.kinds, made.vec, values,
                   grid=made.grid, wide=made.wide, arch=arch)  # fmt: skip
    planned.workspace = made.workspace
    if made.wide or mode is MOMENTS or made.values["AXIS"] == OUTER.value:  # a large state, or those of `vec` columns
        planned.config = replace(planned.config, max_registers=MORE_REGISTERS)
    return planned


def fold(name, result, input, mask, weight, dim, keepdim, empty_nan=False, dtype=None, parameter=0.0,
         absolute=False, negate=False, saturate=False):  # fmt: skip
    """(value, origin, scale) over `dim` (None or (): all); of a COUNT, which reads no input, the value alone."""
    counting = result is COUNT
    if counting:
        dtype = torch.int64
    elif dtype is None:
        dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    x = None if counting else input  # of any dtype
    given = [t for t in (x, mask, weight) if t is not None]
    check_operands(name, *given)
    dim, device = tuple(dim) if dim else (), given[0].device
    key = (result.value, input.shape, *map(trait, (x, mask, weight)), dim, keepdim, empty_nan, dtype, absolute, negate,
           saturate, device, reducing.POLICY)  # fmt: skip

    def build():
        reduced = reducing.reduced_dims(input.shape, dim)
        # an overflow that saturates is told from an infinite element: |x| is summed where fp32 elements do not overflow
        adding = saturate and result is ABSOLUTE_SUM
        wide = adding or torch.float64 in (dtype, *(t.dtype for t in given))
        made = plan(
            result,
            (x, mask, weight),
            input.shape,
            reduced,
            dtype,
            torch.float64 if wide else torch.float32,
            absolute=absolute,
            negate=negate,
            saturate=saturate,
            empty_nan=empty_nan,
            arch=arch_of(device),
        )
        made.out_shape = reducing.reduced_shape(input.shape, reduced, keepdim)
        return made

    made = cached_plan(key, build)
    out = torch.empty(made.out_shape, dtype=dtype, device=device)
    origin = scale = None
    if not counting:
        origin, scale = (torch.empty(made.out_shape, dtype=torch.float64, device=device) for _ in range(2))
    if out.numel():
        made(device, x, mask, weight, out, origin, scale, *reducing.workspace(made, device), float(parameter))
    return out if counting else (out, origin, scale)

"""Makes plans (kernel, constants and launch options, from meta tensors) of the statistics, forward and backward.
test_triton_build.py compiles them."""

import re

import torch
from safeops.kernels.engine import state
from safeops.kernels.reductions import statistic, statistic_backward
from safeops.kernels.reductions.masked_amax import largest, smallest
from safeops.kernels.reductions.masked_logsumexp import logarithm
from safeops.kernels.reductions.masked_norm import absolute_sum, norm, root_mean_square, square_sum
from safeops.kernels.reductions.masked_var import deviation, silog, variance

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FLAT = (1 << 26,)


# Names of the plans that are compiled for other architectures than sm_90, too: the statistic that keeps the most
# numbers per row, in each layout, and the backward.
OFTEN = re.compile(
    r"aligned (var|linear_backward|(columns weight|columns unmasked|few rows) VAR) bfloat16|aligned var weight bf16.*|"
    r"general transposed VAR bfloat16"
)


def meta(shape, dtype, strides=None):
    shape = tuple(shape)
    return torch.empty_strided(shape, strides or torch.empty(shape, device="meta").stride(), dtype=dtype, device="meta")


# name -> (MODE: the numbers that a row keeps while it is read, function that computes the result from them)
STATISTICS = {
    "COUNT": (state.COUNT, None),
    "ABSOLUTE_SUM": (state.ABSOLUTE, absolute_sum),
    "SQUARE_SUM": (state.SQUARES, square_sum),
    "NORM": (state.SQUARES, norm),
    "RMS": (state.SQUARES, root_mean_square),
    "LOGSUMEXP": (state.EXPONENTIALS, logarithm),
    "LARGEST": (state.EXTREME, largest),
    "SMALLEST": (state.EXTREME, smallest),
    "VAR": (state.MOMENTS, variance),
    "STD": (state.MOMENTS, deviation),
    "SILOG": (state.MOMENTS, silog),
}


def forward(name, x, mask=None, weight=None, dims=None, shape=None, **options):
    shape = x.shape if shape is None else shape
    gone = [dims is None or d in dims for d in range(len(shape))]
    dtypes = [t.dtype for t in (x, weight) if t is not None]
    dtype = torch.int64 if name == "COUNT" else F64 if x.dtype == F64 else F32
    compute = F64 if F64 in dtypes else F32
    return statistic.plan(*STATISTICS[name], (x, mask, weight), shape, gone, dtype, compute, **options)


def backward(kind, x, mask=None, weight=None, dims=None):
    """Returns the plan of the backward. In grad, origin and scale the reduced dims have size 1, as the launcher passes
    them."""
    reduced_shape = [1 if dims is None or d in dims else n for d, n in enumerate(x.shape)]
    grad, origin, scale = meta(reduced_shape, F32), meta(reduced_shape, F64), meta(reduced_shape, F64)
    tensors = (x, origin, mask, weight, grad, scale, torch.empty_like(x))
    return statistic_backward.backward_plan(statistic_backward.SLOPES[kind], tensors, x.shape)


def cases():
    results = {}
    for dtype in (F16, BF16, F32, F64):
        name, x, mask = str(dtype)[6:], meta(FLAT, dtype), meta(FLAT, torch.bool)
        results[f"aligned var {name}"] = forward("VAR", x, mask)
        if dtype != F16:  # fp16 takes bf16's path
            results[f"aligned logsumexp {name}"] = forward("LOGSUMEXP", x, mask)
            results[f"aligned linear_backward {name}"] = backward(0, x, mask)
    x, mask, w = meta(FLAT, BF16), meta(FLAT, torch.bool), meta(FLAT, F32)
    results["aligned amax bf16"] = forward("LARGEST", x, mask)
    results["aligned norm bf16"] = forward("NORM", x, mask)
    results["aligned norm -inf bf16"] = forward("SMALLEST", x, mask, absolute=True, negate=True)
    results["aligned norm 1 bf16"] = forward("ABSOLUTE_SUM", x, mask, absolute=True)
    results["aligned safe_norm bf16"] = forward("NORM", x, mask, absolute=True, saturate=True)
    results["aligned sum of squares bf16"] = forward("SQUARE_SUM", x, mask)
    results["aligned std bf16"] = forward("STD", x)
    results["aligned silog bf16"] = forward("SILOG", x, mask)
    results["aligned rms weight bf16"] = forward("RMS", x, mask, x)
    results["aligned var weight bf16+fp32"] = forward("VAR", x, mask, w)
    results["aligned logsumexp weight bf16"] = forward("LOGSUMEXP", x, mask, x)
    results["count flat bf16"] = forward("COUNT", None, mask, shape=FLAT)
    results["aligned count weight bf16"] = forward("COUNT", None, mask, x, shape=FLAT)
    for kind, slope in enumerate(statistic_backward.SLOPES[1:], 1):
        results[f"aligned {slope.__name__}_backward bf16"] = backward(kind, x, mask, x if kind == 2 else None)
    for dtype in (BF16, F32):
        name, x, mask = str(dtype)[6:], meta((8192, 4096), dtype), meta((8192, 4096), torch.bool)
        for result in ("VAR", "LOGSUMEXP", "LARGEST"):
            results[f"aligned rows {result} {name}"] = forward(result, x, mask, dims=[1])
            results[f"aligned columns {result} {name}"] = forward(result, x, mask, dims=[0])
        results[f"aligned columns unmasked VAR {name}"] = forward("VAR", x, dims=[0])
        results[f"aligned few rows VAR {name}"] = forward("VAR", meta((64, 1 << 20), dtype), dims=[1])
        results[f"aligned columns weight VAR {name}"] = forward("VAR", x, mask, x, dims=[0])
        results[f"aligned rows linear_backward {name}"] = backward(0, x, mask, x, dims=[1])
        results[f"aligned columns exponential_backward {name}"] = backward(2, x, mask, dims=[0])
        results[f"aligned 2^33 VAR {name}"] = forward("VAR", meta((1 << 33,), dtype))
        across = meta((8192, 4096), dtype, (1, 8192))
        results[f"general transposed VAR {name}"] = forward("VAR", across, mask, x)
        results[f"general odd rows LOGSUMEXP {name}"] = forward("LOGSUMEXP", meta((511, 4095), dtype), dims=[1])
        results[f"general batch and space VAR {name}"] = forward("VAR", meta((32, 64, 4095), dtype), dims=[0, 2])
        results[f"general transposed linear_backward {name}"] = backward(0, across, mask, dims=[1])
    rare = re.compile(r".*(rows|batch|2\^33|LOGSUMEXP|columns \w+).* float32")  # fp32 takes bf16's path here
    return {name: plan for name, plan in results.items() if not rare.match(name)}


def covered(plans):
    """Assert that every statistic and every derivative of the backward (SLOPES) has a plan."""
    used = {(plan.constants.get("MODE"), plan.constants.get("FINISH")) for plan in plans}
    assert {(mode.value, finish) for mode, finish in STATISTICS.values()} <= used
    assert set(statistic_backward.SLOPES) <= {plan.constants.get("F") for plan in plans}

"""Makes plans (kernel, constants and launch options, from meta tensors) of the segment reductions, forward and
backward. test_triton_build.py compiles them."""

import re

import torch
from safeops.kernels.reductions import segment_backward, segment_sum

from tests.kernels.plans_statistics import BF16, F16, F32, F64, meta

I32, I64 = torch.int32, torch.int64
MODES = {"sum": segment_sum.SUM, "mean": segment_sum.MEAN, "max": segment_sum.EXTREME}
OFTEN = re.compile(
    r"aligned segment_(mean|max)(_backward)? ((weight|unmasked) )?bfloat16|general segment_mean flat bfloat16"
)


def forward(op, x, mask=None, weight=None, sequences=64, ids=False, bounds=I32):
    double = F64 in (x.dtype, weight is not None and weight.dtype)
    order = meta(x.shape[:1], I64) if ids else None
    return segment_sum.plan(
        MODES[op], (x, mask, weight), meta((sequences + 1,), bounds), order, x.shape, sequences,
        F64 if double else F32, F64 if x.dtype == F64 else F32, False,
    )  # fmt: skip


def backward(op, x, mask=None, weight=None, sequences=64, ids=False):
    shape = (sequences, *x.shape[1:])
    extremes = (x, meta(shape, F32)) if op == "max" else (None, None)
    denominator = None if op == "sum" else meta(shape, F64)
    out = meta(x.shape, x.dtype)
    tensors = (*extremes, mask, weight, meta(shape, F32), denominator, out)
    segment_ids = meta(x.shape[:1], I64) if ids else None
    return segment_backward.backward_plan(tensors, meta((sequences + 1,), I32), segment_ids, x.shape, sequences)


def cases():
    results = {}
    for dtype in (F16, BF16, F32, F64):
        name, x, mask = str(dtype)[6:], meta((65536, 512), dtype), meta((65536, 512), torch.bool)
        for op in MODES:
            results[f"aligned segment_{op} {name}"] = forward(op, x, mask)
            results[f"aligned segment_{op}_backward {name}"] = backward(op, x, mask)
    for dtype in (BF16, F32):
        name, x, rows = str(dtype)[6:], meta((65536, 512), dtype), meta((65536, 1), torch.bool)
        results[f"aligned segment_mean weight {name}"] = forward("mean", x, rows, x)
        results[f"aligned segment_mean_backward weight {name}"] = backward("mean", x, rows, x)
        for op in ("mean", "max"):
            results[f"aligned segment_{op} unmasked {name}"] = forward(op, x)
        results[f"aligned segment_mean many {name}"] = forward("mean", x, sequences=8192, bounds=I64)
        results[f"aligned segment_mean ids {name}"] = forward("mean", x, ids=True)
        results[f"aligned segment_mean_backward ids {name}"] = backward("mean", x, ids=True)
        flat, keep = meta((1 << 20,), dtype), meta((1 << 20,), torch.bool)
        results[f"general segment_mean flat {name}"] = forward("mean", flat, keep)
        results[f"general segment_max flat weight {name}"] = forward("max", flat, keep, flat)
        results[f"general segment_mean_backward flat {name}"] = backward("mean", flat, keep)
        odd, across = meta((4096, 511), dtype), meta((4096, 512), dtype, (1, 4096))
        results[f"general segment_max odd {name}"] = forward("max", odd, meta((4096, 511), torch.bool))
        results[f"general segment_max_backward odd {name}"] = backward("max", odd, meta((4096, 511), torch.bool))
        results[f"general segment_mean transposed {name}"] = forward("mean", across, None, across)
    huge = meta((1 << 23, 1024), BF16)
    results["aligned segment_sum 2^33 bfloat16"] = forward("sum", huge)
    results["aligned segment_sum_backward 2^33 bfloat16"] = backward("sum", huge)
    rare = re.compile(r".*(unmasked|many|ids|odd|transposed) float32")  # fp32 takes bf16's path here
    return {name: plan for name, plan in results.items() if not rare.match(name)}


def covered(plans):
    """Assert that each reduction has plans in which several blocks share a sequence, and plans in which none do."""
    plans = [plan for plan in plans if plan.kernel is segment_sum.SEGMENT]
    assert {plan.constants["MODE"] for plan in plans} == {mode.value for mode in MODES.values()}
    assert {plan.constants["SPLIT"] for plan in plans} == {True, False}

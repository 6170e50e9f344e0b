"""Makes plans (kernel, constants and launch options, from meta tensors) of the region losses: their sums, the loss of
the sums, and the backward of both. test_triton_build.py compiles them."""

import re

import torch
from safeops.kernels.losses import region_loss
from safeops.kernels.losses.region_sums import REGION_SUMS, sums_plan
from safeops.kernels.losses.region_sums_backward import REGION_SUMS_BACKWARD as BACKWARD
from safeops.kernels.losses.region_sums_backward import backward_plan

from tests.kernels.plans_statistics import BF16, F16, F32, F64, meta

# Names of the plans that are compiled for other architectures than sm_90, too.
OFTEN = re.compile(
    r"aligned regions(_backward)? (indices masked|soft squared|channels last) bfloat16|.* loss_of_sums mean"
)
SHAPE, ONE, LAST, ODD = (8, 21, 512, 512), (1, 1, 2048, 2048), (8, 64, 512, 512), (8, 21, 511, 511)


def operands(shape, dtype, soft=False, masked=False, last=False):
    """Returns (prediction, target, mask)."""
    n, classes, *pixels = shape
    strides = torch.empty(n, *pixels, classes, device="meta").movedim(-1, 1).stride() if last else None
    x = meta(shape, dtype, strides)
    target = torch.empty_like(x) if soft else meta((n, *pixels), torch.int64)
    return x, target, meta((n, 1, *pixels), torch.bool) if masked else None


def forward(x, target, mask, squared=False, exists=None):
    return sums_plan(x, target, mask, exists, 255, squared)


def backward(x, target, mask, squared=False, exists=None, both=True):
    """Returns the plan of the backward of the sums. both: a floating-point target gets a gradient, too."""
    soft = target.is_floating_point()
    dy = torch.empty_like(target) if soft and both else None
    tensors = (torch.empty_like(x), dy, x if squared or dy is not None else None, target, mask)
    return backward_plan(meta((4, *x.shape[:2]), F64), tensors, x, exists, 255, squared)


def of_sums(kernel, names, dtypes, weight=False, divisor=None, reduction=1, batch=False, parameters=0, **values):
    """Returns the plan of the kernel that computes the loss from the sums, or of its backward. dtypes: those of all
    pointers except `sums` (fp64) and `weight` (bf16)."""
    sums, weight = meta((4, *SHAPE[:2]), F64), meta(SHAPE[1:2], BF16) if weight else None
    dtypes = {**dict.fromkeys(names), "sums": F64, "weight": None if weight is None else BF16, **dtypes}
    return region_loss.loss_plan(kernel, dtypes, sums, weight, divisor, reduction, False, batch, parameters, **values)


def losses():
    for back in (False, True):
        kernel = region_loss.REGION_LOSS_BACKWARD if back else region_loss.REGION_LOSS
        names, values = (region_loss.BACKWARD, {"grad_strides": (0, 0)}) if back else (region_loss.FORWARD, {})
        out, outputs = ({"grad": F32, "out": F64}, {"weight_out": BF16}) if back else ({"out": F32}, {})
        name = "general" + " backward" * back + " loss_of_sums"
        yield f"{name} mean", of_sums(kernel, names, out, **values)
        yield f"{name} none", of_sums(kernel, names, out, reduction=0, parameters=2, **values)
        yield f"{name} weighted", of_sums(kernel, names, out | outputs, True, parameters=2, batch=True, **values)
        yield f"{name} by a tensor", of_sums(kernel, names, out | outputs | {"denominator": F32}, True, **values)


def cases():
    results = dict(losses()) | {"aligned regions many small bfloat16": forward(*operands((1 << 14, 4, 32, 32), BF16))}
    for dtype in (F16, BF16, F32, F64):
        name, exists = str(dtype)[6:], meta(SHAPE[1:2], torch.bool)
        for make, back in ((forward, ""), (backward, "_backward")):
            results[f"aligned regions{back} indices {name}"] = make(*operands(SHAPE, dtype))
            results[f"aligned regions{back} soft squared {name}"] = make(*operands(SHAPE, dtype, True, True), True)
            if dtype in (F16, F64):  # bf16 and fp32 are covered by the other plans
                continue
            results[f"aligned regions{back} indices masked {name}"] = make(
                *operands(SHAPE, dtype, False, True), True, exists
            )
            results[f"aligned regions{back} one class {name}"] = make(*operands(ONE, dtype, True))
            results[f"aligned regions{back} channels last {name}"] = make(*operands(LAST, dtype, last=True))
            results[f"aligned regions{back} soft channels last {name}"] = make(
                *operands(LAST, dtype, True, True, True), True
            )
            results[f"general regions{back} indices {name}"] = make(*operands(ODD, dtype, False, True))
            results[f"general regions{back} soft {name}"] = make(*operands(ODD, dtype, True, True), True)
            results[f"general regions{back} channels last {name}"] = make(*operands(ODD, dtype, False, True, True))
            results[f"aligned regions{back} 2^33 {name}"] = make(*operands((2, 4, 1 << 30), dtype))
    return results


def covered(plans):
    """Assert that there are plans for targets as class indices and as values, for squared and plain sums, and for
    planes summed by one block and by several."""
    sums, backward = ([plan.constants for plan in plans if plan.kernel is kernel] for kernel in (REGION_SUMS, BACKWARD))
    for results in (sums, backward):
        assert len({(constants["INDEXED"], constants["SQUARED"]) for constants in results}) == 4
    assert {constants["SPLIT"] for constants in sums} == {False, True}

"""The plans of cross_entropy and nll_loss, forward and backward, for test_triton_build.py."""

import re

import torch
from safeops.kernels.rows import cross_entropy as ce
from safeops.kernels.rows import cross_entropy_backward as ce_backward
from safeops.kernels.rows import plan as row

from tests.kernels.plans_statistics import BF16, F16, F32, F64, meta

OFTEN = re.compile(  # as in plans_statistics.py
    r"aligned cross_entropy(_backward)?( few long| smoothing weight| images)? bfloat16|"
    r"general cross_entropy(_backward)? shares odd bfloat16"
)
I64 = torch.int64


def tensors(x, shares, weight):
    rows = x.shape[:1] + x.shape[2:]
    target = torch.empty_like(x) if shares else meta(rows, I64)
    return target, meta((x.shape[1],), F32) if weight else None, meta(rows, torch.bool), rows


def forward(x, shares=False, weight=False, smooth=False):
    target, w, mask, _ = tensors(x, shares, weight)
    _, plan, constants, options = ce.prepare(x, target, w, mask, smooth)
    return row.plan(*plan, constants, **options)


def backward(x, shares=False, weight=False, smooth=False, partial=False, need_target=False):
    target, w, mask, rows = tensors(x, shares, weight)
    grad, dq = meta((), F32).expand(rows), torch.empty_like(target) if need_target else None
    plan, constants = ce_backward.prepare(
        grad, x, target, meta(rows, F64), w, mask, smooth, partial, torch.empty_like(x), dq
    )
    return row.plan(*plan, constants, **ce_backward.OPTIONS)


def cases():
    found = {}
    for dtype in (F16, BF16, F32, F64):
        name, x = str(dtype)[6:], meta((8192, 32000), dtype)
        found[f"aligned cross_entropy {name}"] = forward(x)
        found[f"aligned cross_entropy_backward {name}"] = backward(x)
    for dtype in (BF16, F32):
        name, x, short = str(dtype)[6:], meta((8192, 32000), dtype), meta((1 << 16, 1024), dtype)
        few, images = meta((128, 131072), dtype), meta((64, 32, 4096), dtype)
        across, odd = meta((8192, 4096), dtype, (1, 8192)), meta((511, 4095), dtype)
        tall, wide = meta((2, 1 << 18, 64), dtype), meta((1 << 17, 1 << 16), dtype)
        for make, which in ((forward, "cross_entropy"), (backward, "cross_entropy_backward")):
            found[f"aligned {which} short {name}"] = make(short)
            found[f"aligned {which} few long {name}"] = make(few)
            found[f"aligned {which} images {name}"] = make(images)
            found[f"aligned {which} few long columns {name}"] = make(tall)
            found[f"aligned {which} wide {name}"] = make(wide)
            found[f"aligned {which} weight {name}"] = make(x, weight=True)
            found[f"aligned {which} smoothing {name}"] = make(x, smooth=True)
            found[f"aligned {which} smoothing weight {name}"] = make(x, weight=True, smooth=True)
            found[f"aligned {which} smoothing few long {name}"] = make(few, weight=True, smooth=True)
            found[f"aligned {which} shares {name}"] = make(x, shares=True)
            found[f"aligned {which} shares all {name}"] = make(x, True, True, True)
            found[f"aligned {which} shares few long {name}"] = make(few, True, True, True)
            found[f"aligned {which} shares images {name}"] = make(images, True, True, True)
            found[f"general {which} transposed {name}"] = make(across, weight=True, smooth=True)
            found[f"general {which} odd {name}"] = make(odd)
            found[f"general {which} shares odd {name}"] = make(odd, True, True, True)
        found[f"aligned cross_entropy_backward both {name}"] = backward(x, True, True, True, need_target=True)
        found[f"aligned cross_entropy_backward partial {name}"] = backward(x, partial=True)
    return found

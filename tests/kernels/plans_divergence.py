"""Makes plans (kernel, constants and launch options, from meta tensors) of the divergences of two rows of logits,
forward and backward. test_triton_build.py compiles them."""

import itertools
import re

import torch
from safeops.kernels.divergences import divergence as forward_of
from safeops.kernels.divergences import divergence_backward as backward_of
from safeops.kernels.engine import row_plan as row

from tests.kernels.plans_statistics import BF16, F32, F64, meta

# Names of the plans that are compiled for other architectures than sm_90, too.
OFTEN = re.compile(r"(aligned kl|aligned js|general tv)(_backward)? (long|odd) bfloat16")
KINDS = {"kl": forward_of.KL, "js": forward_of.JS, "tv": forward_of.TV}


def forward(op, x, y):
    _, plan, constants, options = forward_of.prepare(op, x, y, meta(x.shape[:-1], torch.bool))
    return row.plan(*plan, constants, **options)


def sums(op, x, y):
    """Returns the plan that sums over some of the classes, given row_stats, the numbers that forward saves per row, of
    whole rows."""
    rows = x.shape[:-1]
    _, plan, constants, options = forward_of.prepare(op, x, y, meta(rows, torch.bool), numbers_of(x))
    return row.plan(*plan, constants, **options)


def numbers_of(x):
    return meta((forward_of.ROW_STATS, *x.shape[:-1]), F64 if x.dtype == F64 else F32)


def backward(op, x, y, *needed):
    rows = x.shape[:-1]
    numbers = numbers_of(x)
    grad, keep = meta((), F32).expand(rows), meta(rows, torch.bool)
    _, plan, constants, options = backward_of.prepare(op, grad, x, y, numbers, keep, needed or (True, False))
    return row.plan(*plan, constants, **options)


def cases():
    results = {}
    across, odd, wide = meta((8192, 4096), BF16, (1, 8192)), meta((511, 4095), BF16), meta((1 << 17, 1 << 16), BF16)
    for kind, op in KINDS.items():
        for make, which in ((forward, kind), (backward, f"{kind}_backward")):
            for dtype in (BF16, F64):
                name, x = str(dtype)[6:], meta((8192, 128256), dtype)
                results[f"aligned {which} long {name}"] = make(op, x, x)
                results[f"aligned {which} short {name}"] = make(op, x[:, :1024].contiguous(), x[:, :1024].contiguous())
                results[f"general {which} odd {name}"] = make(op, odd.to(dtype), odd.to(dtype))
            results[f"aligned {which} whole bfloat16"] = make(op, x_of(8192), x_of(8192))
            results[f"aligned {which} most that is whole bfloat16"] = make(op, x_of(16384), x_of(16384))
            results[f"aligned {which} across bfloat16"] = make(op, across, across)
            results[f"aligned {which} wide bfloat16"] = make(op, wide, wide)
        for dtype in (BF16, F64) if kind != "kl" else ():
            name, x, short = str(dtype)[6:], meta((8192, 32064), dtype), meta((8192, 1024), dtype)
            results[f"aligned {kind}_sums long {name}"] = sums(op, x, x)
            results[f"aligned {kind}_sums short {name}"] = sums(op, short, short)
            results[f"general {kind}_sums odd {name}"] = sums(op, odd.to(dtype), odd.to(dtype))
        results[f"aligned {kind}_backward both bfloat16"] = backward(op, x_of(32000), x_of(32000), True, True)
    return results


def x_of(classes):
    return meta((4096, classes), BF16)


def covered(plans):
    """Assert that each divergence has plans with rows held whole and read in parts, both with row_stats computed and,
    but for KL, with row_stats given."""
    names, forwards = ("OP", "WHOLE", "GIVEN"), [plan for plan in plans if plan.kernel is forward_of.DIVERGENCE]
    seen = {tuple(plan.constants[name] for name in names) for plan in forwards}
    every = {(op.value, *flags) for op in KINDS.values() for flags in itertools.product((False, True), repeat=2)}
    assert seen == every - {(forward_of.KL.value, whole, True) for whole in (False, True)}

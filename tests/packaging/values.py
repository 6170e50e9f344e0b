"""Run by the interpreter of a clean environment, away from the tree: forward and backward of each op, and its route.

Arguments: the environment's folder, and `kernel` or `composite`.
"""

import math
import sys
from pathlib import Path

import safeops.kernels
import torch

import safeops

folder, route = Path(sys.argv[1]).resolve(), sys.argv[2]
for module in (safeops, safeops.kernels):
    assert Path(module.__file__).resolve().is_relative_to(folder), f"{module.__name__} is {module.__file__}"

OPS = "masked_fill safe_div masked_sum masked_mean mse_loss l1_loss smooth_l1_loss huber_loss".split()
OPS += "safe_reciprocal safe_log safe_sqrt safe_rsqrt safe_exp safe_acos safe_asin safe_pow safe_atan2 xlogy".split()
for op in OPS:
    attached = torch._C._dispatch_has_kernel_for_dispatch_key(f"safeops::_{op}", "CPU")
    assert attached == (route == "kernel"), f"{op}: C++ kernel attached: {attached}, expected {route}"

nan, inf = math.nan, math.inf


def check(name, output, x, value, gradient):
    """output and d(sum of output)/dx, exactly."""
    (found,) = torch.autograd.grad(output.sum(), x)
    for what, got, expected in (("value", output, value), ("gradient", found, gradient)):
        expected = torch.tensor(expected, dtype=got.dtype)
        assert torch.equal(got.detach(), expected), f"{name}: {what} {got.tolist()}, expected {expected.tolist()}"


for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    keep = torch.tensor([True, True, False, True])
    x = torch.tensor([1.0, 2.0, nan, 4.0], dtype=dtype, requires_grad=True)
    y = torch.tensor([0.5, 4.0, inf, 4.0], dtype=dtype)
    check("masked_fill", safeops.masked_fill(x, ~keep, -1.0), x, [1, 2, -1, 4], [1, 1, 0, 1])
    other = torch.tensor([2.0, 0.0, 1.0, -4.0], dtype=dtype)
    clean = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype, requires_grad=True)
    check("safe_div", safeops.safe_div(clean, other), clean, [0.5, 0, 3, -1], [0.5, 0, 1, -0.25])
    hurts, top = torch.tensor([4.0, 0.0, 0.25, -1.0], dtype=dtype, requires_grad=True), torch.finfo(dtype).max
    check("safe_reciprocal", safeops.safe_reciprocal(hurts), hurts, [0.25, 0, 4, -1], [-0.0625, 0, -16, -1])
    check("safe_log", safeops.safe_log(clean, eps=4), clean, [math.log(4)] * 4, [0, 0, 0, 0.25])
    check("safe_sqrt", safeops.safe_sqrt(hurts), hurts, [2, 0, 0.5, 0], [0.25, 0, 1, 0])
    check("safe_rsqrt", safeops.safe_rsqrt(hurts, eps=2**-10), hurts, [0.5, 32, 2, 32], [-0.0625, 0, -4, 0])
    check("safe_exp", safeops.safe_exp(hurts * 1e4 * (hurts > 1)), hurts, [top, 1, 1, 1], [0, 0, 0, 0])
    check("safe_acos", safeops.safe_acos(clean), clean, [0, 0, 0, 0], [0, 0, 0, 0])
    check("safe_asin", safeops.safe_asin(hurts * (hurts > 1)), hurts, [math.pi / 2, 0, 0, 0], [0, 0, 0, 0])
    check("safe_pow", safeops.safe_pow(hurts, 0.5), hurts, [2, 0, 0.5, 0], [0.25, 0, 1, 0])
    check("safe_atan2", safeops.safe_atan2(hurts * 0, hurts.detach()), hurts, [0, 0, 0, -math.pi], [0, 0, 0, 0])
    check("xlogy", safeops.xlogy(hurts, torch.ones_like(hurts)), hurts, [0, 0, 0, 0], [0, 0, 0, 0])
    check("masked_sum", safeops.masked_sum(x, keep), x, 7.0, [1, 1, 0, 1])
    weight = torch.tensor([1.0, 2.0, 1.0, 1.0])
    check("masked_mean", safeops.masked_mean(x, keep, weight=weight), x, 2.25, [0.25, 0.5, 0, 0.25])
    total = {"mask": keep, "reduction": "sum"}
    check("mse_loss", safeops.mse_loss(x, y, **total), x, 4.25, [1, -4, 0, 0])
    check("l1_loss", safeops.l1_loss(x, y, **total), x, 2.5, [1, -1, 0, 0])
    check("smooth_l1_loss", safeops.smooth_l1_loss(x, y, **total), x, 1.625, [0.5, -1, 0, 0])
    check("huber_loss", safeops.huber_loss(x, y, delta=0.5, **total), x, 0.125 + 0.875, [0.5, -0.5, 0, 0])
print(route, "ok")

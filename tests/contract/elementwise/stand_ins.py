"""Helpers to test functions at their boundaries, at the neighboring numbers on each side, per dtype and route."""

import math

import pytest
import torch

from safeops.testing import DTYPES
from safeops.testing.compare import TOLERANCES
from tests.contract.common import DEVICE, on

INF, NAN = math.inf, math.nan
HALVES = (torch.float16, torch.bfloat16)


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def tensor(values, dtype=torch.float32):
    """Returns nine copies of `values`, enough for a vector loop and its tail. Each value must be exact in the dtype."""
    result = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert all(v != v or float(m) == v for v, m in zip(values, result)), "not exact in this dtype"
    return result.repeat(9).to(DEVICE)


def compute(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def near(x, dtype, towards):
    """Returns the next number of the dtype after x in the direction of `towards`."""
    x = torch.tensor(x, dtype=dtype)
    return float(torch.nextafter(x, torch.tensor(towards, dtype=dtype)))


def below(x, dtype):
    return near(x, dtype, -INF)


def above(x, dtype):
    return near(x, dtype, INF)


def call(route, name, operands, upstream=1.0, **options):
    """Returns [value, *gradients] of one copy, as lists of numbers. operands: from `tensor`, so nine copies of the
    values. Asserts that the copies agree: to the bit from a kernel; to rounding from torch, whose tail loop may differ
    from its vector loop."""
    leaves = [x.clone().requires_grad_() for x in operands]
    out = on(route, name)(*leaves, **options)
    upstream = torch.full_like(out, upstream)
    grads = torch.autograd.grad(out, leaves, upstream)
    results = []
    for t in (out.detach(), *grads):
        copies = t.cpu().double().reshape(9, -1)
        rtol, atol = (0, 0) if route == "kernel" else TOLERANCES[t.dtype]
        torch.testing.assert_close(copies, copies[:1].expand(9, -1), rtol=rtol, atol=atol, equal_nan=True)
        results.append(copies[0].tolist())
    return results


def assert_equal(got, want, dtype, extra=1.0):
    """Asserts got == want up to `extra` roundings of the dtype, with NaN and infinities in the same places."""
    rtol, atol = TOLERANCES[dtype]
    for g, w in zip(got, want, strict=True):
        rounded = float(torch.tensor(w, dtype=torch.float64).to(dtype))
        same = g == rounded or (g != g and w != w) or abs(g - w) <= extra * rtol * abs(w) + atol
        assert same, f"got {got}, want {want}"


def check(route, name, operands, want, dtype, **options):
    """Asserts that the value and the gradients are `want`, [value, *gradients], and that a gradient of 0 stays 0 under
    an upstream gradient of NaN, inf or 0."""
    got = call(route, name, operands, **options)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_equal(g, w, options.get("dtype", dtype) if i == 0 else dtype)
    for upstream in (NAN, INF, 0.0):
        for g, w in zip(call(route, name, operands, upstream, **options)[1:], want[1:]):
            assert all(value == 0 for value, true in zip(g, w) if true == 0 or upstream == 0), (upstream, g)

"""expm1 and the logarithms have the accuracy of their dtype. A constant rounded to fp32 would show in fp64."""

import pytest
import torch
import triton
import triton.language as tl
from safeops.kernels.engine.math import expm1_nonpositive, log1p_unit, log_any, log_unit, rough_log

N = 1024


@triton.jit
def kernel(x, logs, exps, hits, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(logs + i, log1p_unit(value))
    tl.store(exps + i, expm1_nonpositive(-40 * value))
    tl.store(hits + i, log_unit(value))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-15), (torch.float32, 5e-7)])
@pytest.mark.parametrize("least", [1e-3, 1e-38])
def test_digits(dtype, tolerance, least):
    x = torch.linspace(1e-3, 1, N, dtype=dtype) * (least / 1e-3)
    x[0], x[1] = x[0] / 8, -0.0  # the first is subnormal in fp32
    results = [torch.empty_like(x) for _ in range(3)]
    kernel[(1,)](x, *results, N)
    exact = x.double()
    for got, want in zip(results, (exact.log1p(), torch.expm1(-40 * exact), exact.log())):
        finite = want.isfinite()
        torch.testing.assert_close(
            got.double()[finite], want[finite], rtol=tolerance, atol=torch.finfo(dtype).tiny / 2**22
        )
        assert (got[~finite] < -100).all()  # where it is the logarithm of 0


@triton.jit
def log_kernel(x, logs, rough, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(logs + i, log_any(value))
    tl.store(rough + i, rough_log(value))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-15), (torch.float32, 8e-7)])
def test_logarithms_of_any_number(dtype, tolerance):
    """Logarithms are right near 1, where one computed from a base-2 logarithm loses digits, at both ends of the range,
    and for 0, -1, inf and NaN."""
    tiny, huge = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    special = torch.tensor([0.0, -0.0, -1.0, torch.inf, torch.nan, huge, tiny / 4, tiny], dtype=dtype)
    near = 1 + torch.linspace(-0.3, 0.3, N // 2, dtype=dtype)
    x = torch.cat([torch.logspace(-37, 37, N // 2 - len(special), dtype=dtype), near, special])
    logs, rough = torch.empty_like(x), torch.empty_like(x)
    log_kernel[(1,)](x, logs, rough, N)
    torch.testing.assert_close(logs.double(), x.double().log(), rtol=tolerance, atol=0, equal_nan=True)
    torch.testing.assert_close(rough.double(), x.double().log(), rtol=tolerance, atol=2e-7, equal_nan=True)

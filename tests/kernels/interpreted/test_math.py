"""expm1 and log1p have the digits of their dtype: in fp64 no constant may be an fp32 number."""

import pytest
import torch
import triton
import triton.language as tl
from safeops.kernels.engine.math import expm1_below, log1p_unit

N = 1024


@triton.jit
def kernel(x, logs, exps, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(logs + i, log1p_unit(value))
    tl.store(exps + i, expm1_below(-40 * value))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-15), (torch.float32, 5e-7)])
def test_digits(dtype, tolerance):
    x = torch.linspace(1e-3, 1, N, dtype=dtype)
    logs, exps = torch.empty_like(x), torch.empty_like(x)
    kernel[(1,)](x, logs, exps, N)
    for got, want in ((logs, torch.log1p(x.double())), (exps, torch.expm1(-40 * x.double()))):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=0)

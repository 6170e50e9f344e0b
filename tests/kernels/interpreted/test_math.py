"""expm1 and the logarithms have the digits of their dtype: in fp64 no constant may be an fp32 number."""

import pytest
import torch
import triton
import triton.language as tl
from safeops.kernels.engine.math import expm1_below, log1p_unit, log_unit

N = 1024


@triton.jit
def kernel(x, logs, exps, hits, misses, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    rest = 1 - value
    tl.store(logs + i, log1p_unit(value))
    tl.store(exps + i, expm1_below(-40 * value))
    tl.store(hits + i, log_unit(value))
    tl.store(misses + i, log_unit(rest, (1 - rest) - value))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-15), (torch.float32, 5e-7)])
@pytest.mark.parametrize("least", [1e-3, 1e-38])
def test_digits(dtype, tolerance, least):
    x = torch.linspace(1e-3, 1, N, dtype=dtype) * (least / 1e-3)
    x[0], x[1] = x[0] / 8, -0.0  # the first no normal number in fp32
    found = [torch.empty_like(x) for _ in range(4)]
    kernel[(1,)](x, *found, N)
    exact = x.double()
    for got, want in zip(found, (exact.log1p(), torch.expm1(-40 * exact), exact.log(), torch.log1p(-exact))):
        some = want.isfinite()
        torch.testing.assert_close(got.double()[some], want[some], rtol=tolerance, atol=torch.finfo(dtype).tiny / 2**22)
        assert (got[~some] < -100).all()  # of 0

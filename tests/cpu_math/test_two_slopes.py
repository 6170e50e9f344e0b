"""The driver of the pointwise losses with a function that has a derivative of its own for each operand."""

import itertools
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-std=c++17 -O1 -fPIC -shared -fopenmp-simd -fvisibility=hidden -DTORCH_TARGET_VERSION=0x020b000000000000"
NONE, MEAN = 0, 1
SCALE = 0.5
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}  # rounding of the gradient's own dtype


@pytest.fixture(scope="module")
def ops(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    library, folder = tmp_path_factory.mktemp("two_slopes") / "two_slopes.so", Path(torch.__file__).parent
    paths = [f"-I{ROOT / 'csrc'}", f"-isystem{folder}/include", f"-I{sysconfig.get_path('include')}", f"-L{folder}/lib"]
    source = str(ROOT / "tests" / "cpu_math" / "two_slopes.cpp")
    subprocess.run(["g++", *FLAGS.split(), *paths, source, "-o", library, "-ltorch_cpu", "-ltorch"], check=True)
    torch.ops.load_library(str(library))
    return torch.ops.safeops_two_slopes


def operands(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(37, 130, generator=generator).to(dtype) for _ in range(2))
    mask = torch.rand(37, 130, generator=generator) > 0.3
    x[~mask], y[~mask] = torch.nan, torch.inf
    weight = torch.rand(37, 1, generator=generator) * (torch.arange(37)[:, None] % 5 > 0)
    return x, y, mask, weight


def truth(x, y, kept, weight):
    """The loss of each element in fp64, with x and y as leaves."""
    x, y = (t.double().masked_fill(~kept, 1).requires_grad_() for t in (x, y))
    return x, y, (weight * (torch.exp(SCALE * x) - y * x)).masked_fill(~kept, 0)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_values_and_both_gradients(ops, dtype, weighted):
    x, y, mask, weight = operands(dtype)
    kept = mask & (weight != 0) if weighted else mask
    w = weight.expand_as(x) if weighted else torch.ones(37, 130)
    given = weight if weighted else None
    x64, y64, each = truth(x, y, kept, w.double())
    value, denominator = ops.poisson(x, y, mask, given, None, MEAN, SCALE, False, None)
    expected = each.sum() / w[kept].double().sum()
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-6, atol=0)
    dx64, dy64 = torch.autograd.grad(expected, (x64, y64))
    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype] * 1e-4}
    for need_x, need_y in itertools.product((True, False), repeat=2):
        dx, dy = ops.poisson_backward(
            torch.ones((), dtype=value.dtype), denominator, x, y, mask, given, SCALE, need_x, need_y, None, None
        )
        for needed, found, right in ((need_x, dx, dx64), (need_y, dy, dy64)):
            assert found.dtype == dtype
            assert found.shape == (right.shape if needed else (0,))
            if needed:
                torch.testing.assert_close(found.double(), right, **tolerance)
                assert (found[~kept] == 0).all()


def test_broadcast_and_strided_operands(ops):
    x, y = torch.randn(130, 37, dtype=torch.float64).t(), torch.randn(130, dtype=torch.float64)
    value, _ = ops.poisson(x, y, None, None, None, NONE, SCALE, False, None)
    torch.testing.assert_close(value, torch.exp(SCALE * x) - y * x, rtol=1e-12, atol=0)
    grad = torch.randn(37, 1, dtype=torch.float64).expand(37, 130)
    dx, dy = ops.poisson_backward(grad, None, x, y, None, None, SCALE, True, True, None, None)
    torch.testing.assert_close(dx, grad * (SCALE * torch.exp(SCALE * x) - y), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(dy, -grad * x, rtol=1e-12, atol=0)

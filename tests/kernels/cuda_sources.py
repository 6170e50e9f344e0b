"""Helpers for the tests of the CUDA sources: lists of the sources, and operands in every layout."""

import re

import pytest
import torch

from tests.kernels.executed import cuda
from tests.kernels.executed.cuda import ROOT

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# The sources that use the elementwise loop.
SOURCES = [
    path
    for path in sorted((ROOT / "csrc/cuda").rglob("*.cu"))
    if re.search(r'#include "(loop|floating|unary|binary).cuh"', path.read_text())
]
UNARY = [path.stem for path in SOURCES if "SAFEOPS_UNARY(" in path.read_text()]
BINARY = [path.stem for path in SOURCES if "SAFEOPS_BINARY(" in path.read_text()]
HOST = [ROOT / "csrc/cuda/elementwise/unary.cpp", ROOT / "csrc/cuda/elementwise/binary.cpp"]

needs_compilers = pytest.mark.skipif(not cuda.available(), reason="needs nvcc and g++")


def identical(a, b):
    """Assert the same shape, strides, dtype and bits; any NaN equals any NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape, (a.dtype, b.dtype, a.shape, b.shape)
    assert a.stride() == b.stride(), (a.stride(), b.stride())
    bits = BITS[a.element_size()]
    same = (a.contiguous().view(bits) == b.contiguous().view(bits)) | (a.isnan() & b.isnan())
    assert same.all(), f"{(~same).sum()} of {same.numel()} differ, first at {(~same).nonzero()[0].tolist()}"


def like(x, shape, dtype):
    return torch.empty_like(x, dtype=dtype) if x.shape == shape else torch.empty(shape, dtype=dtype)


def garbage(shape, dtype, seed=0):
    """Returns random values with zeros, subnormals, huge values, inf and NaN among them."""
    torch.manual_seed(seed)
    x = torch.randn(shape, dtype=torch.float64)
    odd = torch.tensor([0.0, -0.0, 1e-7, 1e-40, 6e4, -3e38, float("inf"), -float("inf"), float("nan")], dtype=x.dtype)
    where = torch.rand(shape) < 0.3
    return torch.where(where, odd[torch.randint(len(odd), shape)], x).to(dtype)


def layouts(dtype, make, values=garbage):
    """Yields (name, input, second operand, variant) for every path of the elementwise loop. variant: the kernel that
    must run ("flat", "rows" or "general"; None: no kernel). make(shape, seed): makes the second operand."""
    x = lambda *shape: values(shape, dtype)  # noqa: E731
    yield "one", x(1), make((1,), 1), "flat"
    yield "0-dim", x().reshape(()), make((), 1), "flat"
    yield "empty", x(0, 3), make((0, 3), 1), None
    yield "tile", x(4, 512), make((4, 512), 1), "flat"
    yield "tail", x(4096 + 77), make((4096 + 77,), 1), "flat"
    yield "permuted", x(8, 6, 64).permute(2, 0, 1), make((8, 6, 64), 1).permute(2, 0, 1), "flat"
    channels = x(2, 16, 6, 10).contiguous(memory_format=torch.channels_last)
    yield "channels_last", channels, make((2, 16, 6, 10), 1).contiguous(memory_format=torch.channels_last), "flat"
    yield "channels_last, plain second", channels, make((2, 16, 6, 10), 1), "general"
    yield "padding", x(3, 50, 64), make((3, 50, 1), 1), "rows"
    yield "scalar", x(7, 64), make((), 1), "rows"
    yield "heads", x(2, 3, 16, 64), make((2, 1, 16, 64), 1), "rows"
    yield "grown input", x(16, 64), make((3, 1, 64), 1), "rows"
    yield "expanded input", x(1, 64).expand(9, 64), make((9, 64), 1), "rows"
    yield "stride 0", x(1, 1).expand(20, 64), make((1, 1), 1).expand(20, 64), "rows"
    yield "odd rows", x(5, 33), make((5, 1), 1), "general"
    yield "aligned at its first row alone", x(9, 65)[:, :64], make((9, 64), 1), "general"
    yield "rows of an aligned pitch", x(9, 80)[:, :64], make((9, 80), 1)[:, :64], "rows"
    yield "shifted", x(4097)[1:], make((4097,), 1)[1:], "flat"
    yield "one shifted", x(4103)[3:], make((4100,), 1), "flat"
    yield "the other shifted", x(4097), make((4110,), 1)[13:], "flat"
    yield "transposed", x(37, 129).t(), make((129, 37), 1), "general"
    yield "step", x(300, 6)[::3, ::2], make((100, 3), 1), "general"
    yield "outer", x(31, 1), make((1, 45), 1), "general"
    yield "7 dims", x(2, 3, 2, 3, 2, 3, 2).permute(6, 0, 5, 1, 4, 2, 3), make((2, 1, 3, 1, 2, 1, 3), 1), "general"


def check_variant(ops, variant, wide_rows=True):
    """Assert that the last call launched only this variant's kernel (None: no kernel). Returns how many 16-byte loads
    its threads did."""
    variant = "general" if variant == "rows" and not wide_rows else variant
    kernels = [launch.kernel for launch in ops.launches]
    assert bool(kernels) == bool(variant), kernels
    assert all(f"{variant}_kernel" in kernel for kernel in kernels), (variant, kernels)
    assert variant != "general" or ops.wide == 0, ops.wide
    return ops.wide

"""The elementwise CUDA functions, executed on CPU tensors, agree with the CPU kernels for every pair of edge values and
for edge values of the upstream gradient: neither device gives a NaN or inf that the other device does not give."""

import math

import pytest
import torch

import safeops  # noqa: F401
from tests.kernels.cuda_sources import BINARY, FLOATS, UNARY, needs_compilers

pytestmark = [pytest.mark.slow, needs_compilers, pytest.mark.xdist_group("cuda_executed")]

UPSTREAM = [1.0, -3.0, 0.0, -0.0, math.nan, math.inf, -math.inf]


def edges(dtype):
    """Returns 0, 1 and its neighbors, even, odd and fractional numbers, the dtype's limits, inf and NaN."""
    info = torch.finfo(dtype)
    sizes = [0.0, info.tiny * info.eps, info.tiny, 1e-3, 0.5, 1 - info.eps, 1.0, 1 + info.eps, 1.5, 2.0, 2.5, 3.0, 60.0]
    sizes += [255.0, 1e4, info.max / 2, info.max, math.inf]
    return torch.tensor([*sizes, *(-x for x in sizes), math.nan], dtype=torch.float64).to(dtype)


def alike(got, twin, grad, operands, label):
    """Assert that both have NaN and infinities in the same places, and numbers within the rounding of two math
    libraries.

    Two differences are allowed. (1) Where the upstream gradient is inf and the slope is too small for the dtype, one
    device may give inf and the other 0 inf = NaN: GradScaler sees both. (2) Where an operand is infinite and the
    upstream gradient is 0, either device may give 0 or the NaN of the product."""
    info, wide = torch.finfo(got.dtype), got.dtype in (torch.float32, torch.float64)
    least = info.tiny if wide else 4 * info.tiny * info.eps  # in fp32 the slope is rounded before it is multiplied
    near = (got.double() - twin.double()).abs() <= 4 * info.eps * twin.double().abs() + least
    same = (near & twin.isfinite()) | (got == twin) | (got.isnan() & twin.isnan())
    if grad is not None:
        same |= ~(grad.isfinite() | got.isfinite() | twin.isfinite())
        same |= (grad == 0) & ~torch.stack(operands).isfinite().all(0)
    cells = [tuple(x[i].item() for x in (*operands, got, twin)) for i in (~same).nonzero()[:12, 0]]
    assert same.all(), f"{label}: {(~same).sum()} of {same.numel()} differ, (operands, result, on the CPU): {cells}"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_twins_agree_on_edges(ops, name, dtype):
    points = edges(dtype)
    count = 2 if name in BINARY else 1
    grid = [x.flatten() for x in torch.meshgrid(*[points] * count, indexing="ij")]
    got, twin = (getattr(where, f"_{name}")(*grid) for where in (ops, torch.ops.safeops))
    alike(got, twin, None, grid, "value")
    for upstream in UPSTREAM:
        grad = torch.full_like(grid[0], upstream)
        got, twin = (getattr(where, f"_{name}_backward")(grad, *grid) for where in (ops, torch.ops.safeops))
        if count == 1:
            got, twin = [got], [twin]
        for i, (a, b) in enumerate(zip(got, twin)):
            alike(a, b, grad, grid, f"gradient {i}, upstream {upstream}")

"""The bits of a row's results depend neither on how many rows there are, nor on its place
among them, nor on rows that are not kept, nor, if rows of its length cannot all begin at multiples of 16 bytes, on
where it begins. (Lanes, which add up here as numpy does: test_plans.py.)"""

import pytest
import torch

from tests.contract.rows.test_invariance import OPS, outcome
from tests.kernels.interpreted.truth import BF16, F32

pytestmark = [pytest.mark.usefixtures("triton_route"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

# Rows whole in a tile, of which one block has several, and in parts: of the long ones several blocks share each of two
# rows, and none of seventeen.
ODD, EVEN = (37, 301), (40, 520)  # lengths that are no multiple of 16 bytes, and that are one
BATCHES = ((1, 0), (2, 1), (17, 11))  # (rows, the row's place)
ELSEWHERE = (0, 0), (1, 0), (3, 5)  # elements before the first row, and between one row and the next
CASES = [*((n, *where) for n in ODD for where in ELSEWHERE), *((n, 0, 0) for n in EVEN)]
CASES = [(F32, *case) for case in CASES] + [(BF16, *case) for case in CASES if case[0] > 256]
# Each length, place and dtype once; the other pairs of them are exhaustive.
FEW = (F32, 37, 3, 5), (F32, 301, 1, 0), (F32, 40, 0, 0), (BF16, 301, 3, 5), (BF16, 520, 0, 0)


def rows_at(rows, first, gap):
    """Copies of rows (M, N) in a storage of NaN."""
    M, N = rows.shape
    storage = torch.full((first + M * (N + gap) + 16,), float("nan"), dtype=rows.dtype)
    return storage.as_strided((M, N), (N + gap, 1), first).copy_(rows)


def outcomes(op, length, dtype, M, place, first, gap, masked):
    generator = torch.Generator().manual_seed(length)
    row, other = (3 * torch.randn(length, generator=generator).to(dtype) for _ in range(2))
    x, y = (3 * torch.randn(M, length, generator=generator).to(dtype) for _ in range(2))
    x[place], y[place] = row, other
    keep = None
    if masked:
        keep = torch.arange(M) == place
        x[~keep] = float("nan")
    return [t[place] for t in outcome(OPS[op], rows_at(x, first, gap), rows_at(y, first, gap), keep)]


@pytest.mark.parametrize(
    "dtype, length, first, gap",
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.exhaustive) for case in CASES],
)
@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_see_its_neighbours(op, dtype, length, first, gap):
    for masked in (False, True):
        alone = outcomes(op, length, dtype, 1, 0, 0, 0, masked)
        for M, place in BATCHES:
            for got, wanted in zip(outcomes(op, length, dtype, M, place, first, gap, masked), alone):
                assert torch.equal(got, wanted), (M, place, masked)

"""The bits of a row's results depend neither on how many rows there are, nor on its place
among them, nor on rows that are not kept, nor, if rows of its length cannot all begin at multiples of 16 bytes, on
where it begins. (Lanes, which add up here as numpy does: test_plans.py.)"""

import pytest
import torch

import safeops
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


def bits_of(function, x, *operands):
    x = x.clone().requires_grad_()
    result = function(x, *operands)
    return result.detach(), *torch.autograd.grad(result, x, torch.full_like(result, 1.5))


@pytest.mark.parametrize("dtype, length", [(F32, 40), (F32, 520), (BF16, 520), (F32, 521)])
def test_a_row_does_not_see_where_its_mask_lies(dtype, length):
    generator = torch.Generator().manual_seed(length)
    x = (3 * torch.randn(1, length, generator=generator)).to(dtype)
    mask = torch.rand(1, length, generator=generator) > 0.3
    views = torch.empty(1, length + 1, dtype=torch.bool)[:, 1:], torch.empty(1, length, 2, dtype=torch.bool)[..., 0]
    for function in (safeops.masked_softmax, safeops.masked_log_softmax):
        wanted = bits_of(function, x, mask, -1)
        for view in views:
            assert all(map(torch.equal, bits_of(function, x, view.copy_(mask), -1), wanted))


@pytest.mark.parametrize("dtype, length", [(F32, 40), (F32, 520), (BF16, 520), (BF16, 521)])
def test_a_row_does_not_see_where_the_weights_of_classes_lie(dtype, length):
    generator = torch.Generator().manual_seed(length)
    x = (3 * torch.randn(2, length, generator=generator)).to(dtype)
    weight, target = (torch.rand(length, generator=generator) + 0.5).bfloat16(), torch.tensor([5, 6])
    views = weight.float(), torch.empty(length + 1)[1:], torch.empty(length, 2)[:, 0]

    def loss(x, weight):
        return safeops.cross_entropy(x, target[-len(x) :], weight, label_smoothing=0.1, reduction="none")

    wanted = [t[-1:] for t in bits_of(loss, x, weight)]
    for view in (weight, *(view.copy_(weight) for view in views)):
        for rows in (x[1:], x):
            got = bits_of(loss, rows, view)
            assert all(torch.equal(a[-1:], b) for a, b in zip(got, wanted))

"""The bits of a row's results, in the compiled kernels, do not depend on other rows: not on their number, on the row's
place among them, or on rows that are not kept. They do not depend on the mask's address or on the dtype of operands
that all rows share; nor on the row's address, if rows of its length cannot all be aligned to 16 bytes. docs/limits.md
lists the exceptions."""

import pytest
import torch

pytest.importorskip("triton")

import safeops
from tests.contract.test_invariance import OPS, outcome
from tests.kernels.executed.handwritten import needs_compiler
from tests.kernels.executed.launching import executed, on_launchers
from tests.kernels.executed.subjects import BF16, F32

pytestmark = [
    needs_compiler,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.* is broadcast with"),
]

# Row lengths that fit a tile whole, and longer ones. If there are two long rows, several blocks share each; if there
# are many, each block has its own.
BATCHES = ((1, 0), (2, 1), (17, 11))  # (rows, the row's place)
ELSEWHERE = (0, 0), (1, 0), (3, 5)  # (elements before the first row, elements between rows)
CASES = [(dtype, n, *where) for dtype in (F32, BF16) for n in (37, 1001, 9001, 20001) for where in ELSEWHERE]
CASES += [(dtype, n, 0, 0) for dtype in (F32, BF16) for n in (40, 1000, 9000, 32768, 50000)]
IN_CI = (BF16, 9001, 3, 5)


def rows_at(rows, first, gap):
    """Returns a copy of the rows (M, N) in a storage of NaN: `first` elements before them and `gap` elements between
    them."""
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
    with executed(orders=1), on_launchers():
        return [t[place] for t in outcome(OPS[op], rows_at(x, first, gap), rows_at(y, first, gap), keep)]


@pytest.mark.parametrize(
    "dtype, length, first, gap",
    [pytest.param(*case, marks=() if case == IN_CI else pytest.mark.exhaustive) for case in CASES],
)
@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_see_its_neighbours(op, dtype, length, first, gap):
    for masked in (False, True):
        alone = outcomes(op, length, dtype, 1, 0, 0, 0, masked)
        for M, place in BATCHES:
            for got, wanted in zip(outcomes(op, length, dtype, M, place, first, gap, masked), alone):
                assert torch.equal(got, wanted), (M, place, masked)


def numbers(*shape, seed=1):
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype, columns", [(F32, 1004), (BF16, 1000)])
def test_a_mask_that_begins_anywhere(dtype, columns):
    x, keep = numbers(3, columns).to(dtype), numbers(3, columns, seed=2) > -2
    for op in (safeops.masked_softmax, safeops.masked_log_softmax):
        with executed(orders=1), on_launchers():
            whole = op(x, keep, -1)
            for row in range(3):
                assert torch.equal(op(x[row : row + 1], keep[row : row + 1], -1)[0], whole[row]), row


@pytest.mark.parametrize("columns", [1001, 9001])
def test_weights_of_classes_in_fp32(columns):
    x, target, weight = numbers(3, columns).bfloat16(), torch.tensor([5, 6, 7]), numbers(columns, seed=2).abs() + 0.1
    for smoothing in (0.0, 0.1, 1.0):
        with executed(orders=1), on_launchers():
            whole, alone = (
                safeops.cross_entropy(x[rows], target[rows], weight, label_smoothing=smoothing, reduction="none")
                for rows in (slice(None), slice(2, 3))
            )
        assert torch.equal(whole[2:], alone), smoothing


@pytest.mark.parametrize("channels", [3, 21, 100])
def test_pixels_and_crops(channels):
    """A pixel's bits do not depend on the image's size from 512 pixels on, in multiples of 16 bytes: its channels are
    summed in one order."""
    image, target = numbers(1, channels, 32, 64), torch.zeros(1, 32, 64, dtype=torch.int64)
    with executed(orders=1), on_launchers():
        whole = safeops.cross_entropy(image, target, reduction="none")
        for height, width in ((16, 32), (32, 20), (31, 60)):
            crop, classes = (t[..., :height, :width].contiguous() for t in (image, target))
            result = safeops.cross_entropy(crop, classes, reduction="none")
            assert torch.equal(result, whole[:, :height, :width]), (height, width)

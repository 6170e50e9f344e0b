"""The sketch of a tensor: its numbers, and what they tell of the difference of two tensors."""

import pytest
import torch

from safeops.debug.compare.projection import LARGEST, SIZE, SQUARES, STATS, SUM, signs, sketch_of


def difference(x, y):
    return (sketch_of(x)[STATS:] - sketch_of(y)[STATS:]).norm().item()


def test_its_numbers_are_those_counted_by_hand():
    nan, inf = float("nan"), float("inf")
    sketch = sketch_of(torch.tensor([[3.0, nan, 0.0, -4.0], [inf, inf, -inf, -0.0]], dtype=torch.float16))
    assert sketch[:STATS].tolist() == [1, 2, 1, 2, 4, -1, 25]
    assert len(sketch) == STATS + SIZE and sketch[STATS:].square().sum() == 25  # 2 elements of one row: no collision
    assert sketch_of(torch.tensor([3 + 4j]))[SQUARES] == 25 and sketch_of(torch.zeros(0)).tolist() == [0] * len(sketch)


def test_its_numbers_never_change():
    """Files of other versions are compared with those of this one."""
    x = torch.arange(1.0, 201.0)
    assert sketch_of(x)[STATS : STATS + 6].tolist() == FIRST and signs(12, "cpu").tolist() == SIGNS


FIRST = [38.0, 9.0, -40.0, 11.0, 236.0, -183.0]
SIGNS = [1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_it_does_not_depend_on_dtype_or_layout(dtype):
    x = torch.randint(-8, 8, (30, 4, 50)).to(dtype)  # exact in each
    expected = sketch_of(x.double())
    for y in (x, x.transpose(0, 2).contiguous().transpose(0, 2), x.expand(3, -1, -1, -1)[1]):
        torch.testing.assert_close(sketch_of(y), expected, rtol=0, atol=0)


SLOW = pytest.param(3_000_000, 3_000_000, marks=pytest.mark.slow)


@pytest.mark.parametrize("size, spread", [(64, 64), (4096, 4096), (10_000, 10), SLOW])
def test_it_tells_the_length_of_a_difference(size, spread):
    """100 differences, of `spread` elements: lengths within their standard deviation of an eighth, and rightly so."""
    count = 100 if size < 1_000_000 else 3
    x, ratios = torch.randn(size), []
    for _ in range(count):
        d = torch.zeros(size)
        d[torch.randperm(size)[:spread]] = torch.randn(spread) * 1e-3
        ratios.append(difference(x.double() + d, x.double()) / d.double().norm().item())
    ratios = torch.tensor(ratios)
    assert 0.55 < ratios.min() and ratios.max() < 1.5 and abs(ratios.mean() - 1) < 0.1
    assert ratios.std() < 0.125 or count < 100


def test_a_difference_in_one_column_is_not_lost():
    """A channel is every 64th element: without rotations, it would fall on one number, and often cancel."""
    ratios = []
    for i in range(0, 64, 5):
        d = torch.zeros(1000, 64, dtype=torch.float64)
        d[:, i] = 1e-3
        ratios.append(sketch_of(d)[STATS:].norm().item() / d.norm().item())
    assert min(ratios) > 0.6 and max(ratios) < 1.4


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_the_sketches_of_parts_add_to_that_of_the_whole(parts):
    x = torch.randn(parts * 1111, dtype=torch.float64)
    total = sum(sketch_of(part, i * 1111) for i, part in enumerate(x.chunk(parts)))
    whole = sketch_of(x)
    torch.testing.assert_close(total[STATS:], whole[STATS:])
    torch.testing.assert_close(total[SUM:STATS], whole[SUM:STATS])
    assert whole[LARGEST] == x.abs().max()


def test_a_large_tensor_goes_in_blocks():
    x = torch.randn(2**20 + 77)
    first, rest = x[: 2**19 + 5], x[2**19 + 5 :]
    total = sketch_of(first) + sketch_of(rest, len(first))
    torch.testing.assert_close(sketch_of(x)[STATS:], total[STATS:])
    assert sketch_of(x)[LARGEST] == x.abs().max().double()


def test_signs_are_balanced():
    assert abs(signs(100_000, "cpu").double().mean()) < 0.01

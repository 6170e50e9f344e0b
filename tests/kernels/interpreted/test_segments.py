"""The segment reductions and their backward agree with the definitions in fp64."""

import pytest
import torch
from safeops.kernels.reductions import segment_sum as kernels
from safeops.kernels.reductions.segment_backward import segment_backward

from safeops.ops.reductions._segment import _sorted
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, build, close, fill, kept
from tests.ops import definitions

NAMES = "segment_sum", "segment_mean", "segment_max"
each_op = pytest.mark.parametrize("name", NAMES)
CUTS = {"one": (10,), "few": (1, 1, 3, 10), "none at the end": (0, 4, 10, 10)}  # sequences' ends, in tenths of rows


def bounds_of(rows, cuts, dtype=torch.int64):
    return torch.tensor([0, *(rows * cut // 10 for cut in cuts)], dtype=dtype)


def check(name, x, mask, weight, cu_seqlens, ids=None, order=None):
    value, by = getattr(kernels, name)(x, mask, weight, cu_seqlens, ids, order)
    leaf, w = x.double().requires_grad_(), None if weight is None else weight.double()
    rows = {"cu_seqlens": cu_seqlens} if ids is None else {"segment_ids": ids, "num_segments": len(cu_seqlens) - 1}
    want = getattr(definitions, name)(leaf, **rows, mask=mask, weight=w)
    grad = fill(want.shape, F32, 9)
    (slope,) = torch.autograd.grad(want, leaf, grad.double())
    want = want.detach()
    assert value.dtype == (F64 if x.dtype == F64 else F32) and by.dtype == F64 and by.shape == value.shape
    close(value, want, want.abs().clamp(min=40 if name == "segment_sum" else 3), value.dtype)
    extremes = (x, value) if name == "segment_max" else (None, None)
    denominator = None if name == "segment_sum" else by
    d = segment_backward(grad, x.shape, x.dtype, denominator, *extremes, mask, weight, cu_seqlens, ids)
    assert d.dtype == x.dtype and d.is_contiguous() and not d[~kept(x.shape, mask, weight)].any()
    close(d, slope, slope.abs().max() * 2 if slope.numel() else None, x.dtype)
    return value, d


@each_op
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    "layout", ["flat", "odd", "shifted", "row mask", "channel mask", "transposed", "no two fuse", "many rows", "narrow",
               "one weight", "no mask", "one element"]
)  # fmt: skip
def test_layouts(name, layout, cuts):
    x, _, mask, weight = build(layout)
    check(name, x, mask, weight, bounds_of(x.shape[0], CUTS[cuts]))


@each_op
@pytest.mark.parametrize("dtype", [F16, BF16, F64])
def test_dtypes(name, dtype):
    for layout in ("odd", "row mask"):
        x, _, mask, weight = build(layout, dtype, w_dtype=F16 if dtype == F16 else F32)
        check(name, x, mask, weight, bounds_of(x.shape[0], CUTS["few"], torch.int32))


@each_op
def test_ids_in_any_order(name):
    """Rows in any order, named by sequence ids, give the bits of the sorted rows."""
    x, mask, weight = fill((90, 5), F32, 1), torch.rand(90, 5, generator=torch.Generator().manual_seed(2)) < 0.7, None
    ids = torch.arange(90) * 7 % 90 // 23
    cu_seqlens, order = _sorted(ids, 4)
    value, _ = check(name, x, mask, weight, cu_seqlens, ids, order)
    sorted_value, _ = check(name, x[order], mask[order], weight, cu_seqlens)
    assert torch.equal(value, sorted_value)


@each_op
def test_bits_depend_on_the_sequence_alone(name):
    """A sequence has the same bits alone, among others, and when more blocks share it."""
    x = fill((700, 3), F32, 1)
    for first, last in ((0, 40), (37, 600), (599, 700)):
        alone, _ = getattr(kernels, name)(x[first:last], None, None, torch.tensor([0, last - first]))
        among, _ = getattr(kernels, name)(x, None, None, torch.tensor([0, first, last, 700]))
        many = torch.cat([torch.arange(first % 7, first + 1, 7), torch.arange(last, 701, 7)])
        crowd, _ = getattr(kernels, name)(x, None, None, many)
        assert torch.equal(alone[0], among[1]) and torch.equal(alone[0], crowd[first // 7])


@pytest.mark.parametrize("count", [255, 256, 700, 70000])
@pytest.mark.parametrize("longest", [0, 3, 400])
def test_more_sequences_than_are_read_at_once(count, longest):
    """The backward is right for more sequences than its search reads at once. It searches 256 bounds at a time for the
    sequences of a tile's ends, and between these for each row's. Many sequences are empty; a long one (5 x longest
    rows) may contain whole tiles."""
    lengths = torch.randint(-3, 4, (count,), generator=torch.Generator().manual_seed(count)).clamp(min=0)
    lengths[count // 2] = 5 * longest
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    grad = torch.arange(count, dtype=F32)[:, None]
    d = segment_backward(grad, (int(cu_seqlens[-1]) + 5, 1), F32, cu_seqlens=cu_seqlens)
    want = torch.cat([grad.repeat_interleave(lengths, 0), torch.zeros(5, 1)])
    assert torch.equal(d, want)


@each_op
def test_rows_of_no_sequence(name):
    """Rows outside of all sequences do not count and have gradient 0. The checks on a CPU would refuse such bounds."""
    x = fill((60, 4), F32, 1)
    x[:7], x[50:] = float("nan"), float("inf")
    cu_seqlens, inside = torch.tensor([7, 20, 20, 50]), torch.tensor([0, 13, 13, 43])
    value, by = getattr(kernels, name)(x, None, None, cu_seqlens)
    want, _ = getattr(kernels, name)(x[7:50], None, None, inside)
    assert torch.equal(value, want)
    extremes = (x, value) if name == "segment_max" else (None, None)
    d = segment_backward(torch.full_like(value, torch.nan), x.shape, F32, by, *extremes, None, None, cu_seqlens)
    assert not d[:7].any() and not d[50:].any() and d[7:50].isnan().any()
    ids = torch.full((60,), -1).index_fill(0, torch.arange(7, 20), 0).index_fill(0, torch.arange(20, 50), 2)
    ids[50:] = 3
    d = segment_backward(torch.full_like(value, torch.nan), x.shape, F32, by, *extremes, None, None, cu_seqlens, ids)
    assert not d[:7].any() and not d[50:].any() and d[7:50].isnan().any()


@each_op
def test_kept_nan_and_infinity(name):
    x = fill((40, 2), F32, 1)
    x[3, 0], x[20, 1], x[30, 0] = torch.nan, torch.inf, -torch.inf
    check(name, x, None, None, torch.tensor([0, 10, 25, 40]))
    lowest = torch.full((40, 2), -torch.inf)
    check(name, lowest, None, None, torch.tensor([0, 10, 25, 40]))


@each_op
def test_nothing(name):
    for rows, cuts in ((0, [0, 0]), (0, [0]), (5, [0, 0, 5])):
        for empty_nan in (False, True):
            x = fill((rows, 3), F32, 1)
            value, _ = getattr(kernels, name)(x, None, None, torch.tensor(cuts), empty_nan=empty_nan)
            assert value.shape == (len(cuts) - 1, 3)
            empty = torch.tensor(cuts).diff() == 0
            assert (value[empty].isnan() if empty_nan else value[empty] == 0).all()
    assert not segment_backward(torch.ones(0, 3), (4, 3), F32, cu_seqlens=torch.tensor([0])).any()


def test_a_huge_weight_and_a_tiny_gradient():
    x, weight = torch.ones(4, 2), torch.full((4, 2), 1e30)
    grad = torch.full((1, 2), 1e-38)
    by = torch.full((1, 2), 4e30, dtype=F64)
    d = segment_backward(grad, x.shape, F32, by, None, None, None, weight, torch.tensor([0, 4]))
    close(d, torch.full((4, 2), 0.25e-38, dtype=F64), dtype=F32)


def test_vectors_have_no_gaps():
    x = torch.ones(4, 2)
    with pytest.raises(ValueError, match="cu_seqlens must be a contiguous vector"):
        kernels.segment_sum(x, None, None, torch.tensor([0, 0, 4, 4])[::2])
    with pytest.raises(ValueError, match="segment_ids must be a contiguous vector"):
        ids = torch.zeros(1, dtype=torch.int64).expand(4)
        segment_backward(x[:1], x.shape, F32, cu_seqlens=torch.tensor([0, 4]), segment_ids=ids)

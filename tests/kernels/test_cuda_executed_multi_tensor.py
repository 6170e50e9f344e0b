"""The CUDA kernels of ops over lists of tensors, executed on CPU tensors, agree with their definitions.

The tests cover the part of a tensor that each warp takes, heads and tails, the reported places of nonfinite elements in
every layout, sums over all warps, and that nothing is read or written past an end. scripts/gpu_check.py tests what only
a GPU can show.
"""

import pytest
import torch

from safeops.testing.compare import assert_same_bits
from tests.contract.lists.tensor_lists import FLOATS, expanded, finite, layouts, many, scans, values, writable
from tests.kernels.cuda_sources import ROOT, needs_compilers
from tests.kernels.executed import cuda

each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
pytestmark = [pytest.mark.slow, needs_compilers, pytest.mark.xdist_group("cuda_executed_multi_tensor")]


@pytest.fixture(scope="module")
def ops():
    return cuda.ops(*sorted((ROOT / "csrc/cuda/lists").glob("*.cu")))


def health(function, inputs, row=1):
    out = torch.zeros(row + len(inputs) + 1, 8, dtype=torch.int64)
    function(out, row, inputs)
    return out


@each_dtype
def test_health(ops, dtype):
    # 20,000 elements are several tiles of a warp.
    for inputs in (layouts(dtype) + expanded(dtype), many(dtype), [values(20_000, dtype=dtype)], []):
        got, want = health(ops._health_, inputs), health(scans.health_definition, inputs)
        assert torch.equal(got, want), (got - want).nonzero()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_health_of_every_half(ops, dtype):
    """health counts right over all fp16 and bf16 numbers, in order and shuffled, with and without the nonfinite
    ones."""
    torch.manual_seed(0)
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    sets = [x, x[torch.randperm(len(x))]]
    inputs = [s[kept] for s in sets for kept in (s == s, s.isfinite(), s.abs() < 1e-4, s == 0)] + sets
    got, want = health(ops._health_, inputs), health(scans.health_definition, inputs)
    assert torch.equal(got, want), (got - want).nonzero()


def test_health_of_mixed_dtypes_and_twice(ops):
    inputs = [x for dtype in FLOATS for x in layouts(dtype)]
    want = health(scans.health_definition, inputs)
    got = health(ops._health_, inputs)
    assert torch.equal(got, want)
    ops._health_(got, 1, inputs)
    assert torch.equal(got[:, :6], 2 * want[:, :6]) and torch.equal(got[:, 6:], want[:, 6:])


@each_dtype
def test_the_first_place_is_in_row_major_order(ops, dtype):
    """The first nonfinite element is the first in row-major order, also where memory has another order and later
    elements are read first."""
    zeros = lambda *shape: torch.zeros(shape, dtype=dtype)  # noqa: E731
    for x in (zeros(60, 70).t(), zeros(9000, 1), zeros(99, 2, 50)[:, 1]):
        n, columns = x.numel(), x.shape[1]
        for places in ((n - 1,), (n - 1, n // 2), (0, n - 1), range(17, n, 40)):
            x.zero_()
            for place in places:
                x[place // columns, place % columns] = -torch.inf
            row = health(ops._health_, [x])[1].tolist()
            assert row[2] == len(places) and row[7] == n - min(places)


@each_dtype
def test_pick(ops, dtype):
    for x in layouts(dtype):
        shape = x.shape
        rows = health(scans.health_definition, [x])
        other = [
            torch.arange(x.shape[-1] if x.dim() else 1).reshape(() if x.dim() == 0 else (-1,)),
            torch.ones((), dtype=torch.bool),
            torch.tensor(-3, dtype=torch.int8).expand(shape),
            x,
        ]
        got = torch.full((3, 4), 0.5, dtype=torch.float64)
        want = got.clone()
        ops._pick_(got, 2, rows, 1, [x, *other], shape)
        scans.pick_definition(want, 2, rows, 1, [x, *other], shape)
        assert_same_bits("pick", got.nan_to_num(7), want.nan_to_num(7), "differs from the definition")


@each_dtype
def test_norm(ops, dtype):
    for inputs in (layouts(dtype) + expanded(dtype), many(dtype), [values(20_000, dtype=dtype)]):
        for ord in (1, 2, torch.inf):
            clean = finite(inputs)
            got, want = ops._grad_norm(clean, ord), scans.norm_definition(clean, ord)
            assert got.dtype == torch.float64 and got.shape == ()
            assert abs(got - want) <= 1e-13 * want, (ord, got, want)
            assert torch.equal(ops._grad_norm(clean, ord), got)  # the same bits in each run
            assert ops._grad_norm([*clean, torch.tensor(torch.nan)], ord).isnan()
            assert ops._grad_norm([torch.tensor([1, -torch.inf]), *clean], ord) == torch.inf


@pytest.mark.parametrize("driver, kernels", [(12000, 12), (13000, 2)], ids=["a driver of before 12.1", "a recent one"])
def test_launches_are_as_large_as_the_driver_takes(ops, request, driver, kernels):
    """1,100 tensors do not fit one launch's table: several launches give each tensor its own results."""
    inputs = [torch.full((1 + i % 3,), float(i)) for i in range(1100)]
    request.addfinalizer(lambda: ops.runtime.executed_driver(13000))
    ops.runtime.executed_driver(driver)
    got = health(ops._health_, inputs)
    assert len(ops.launches) == kernels
    assert torch.equal(got, health(scans.health_definition, inputs))
    norm = ops._grad_norm(inputs, 2)
    assert len(ops.launches) == kernels
    torch.testing.assert_close(norm, torch.cat(inputs).double().norm(), rtol=1e-14, atol=0)
    ops._scale_(inputs, torch.tensor(0.5))
    assert len(ops.launches) == kernels
    assert all(x.eq(i / 2).all() for i, x in enumerate(inputs))


def test_norm_at_the_ends_of_the_range(ops):
    for size in (1e300, 1e200, 1e145, 1.0, 1e-145, 1e-200, 1e-320):
        x = torch.full((5000,), size, dtype=torch.float64)
        got = ops._grad_norm([x], 2).item()
        assert abs(got / size / 5000**0.5 - 1) < (1e-12 if size > 1e-300 else 1e-3), size
    mixed = torch.tensor([3e200, 4e200, 1e-300, 7.0, 0.0], dtype=torch.float64)
    assert abs(ops._grad_norm([mixed], 2).item() / 5e200 - 1) < 1e-15
    for nothing in ([torch.zeros(0), torch.zeros(3)], [torch.zeros(0)]):  # for [zeros(0)] no kernel is launched
        assert ops._grad_norm(nothing, 2) == 0


@each_dtype
def test_scale(ops, dtype):
    for inputs in (layouts(dtype), many(dtype), [values(20_000, dtype=dtype)]):
        for factor in (
            torch.tensor(0.3),
            torch.tensor(1e-41, dtype=torch.float64),
            torch.tensor(1e-3, dtype=torch.float64),
            torch.tensor(torch.nan),
        ):
            got, want = writable(inputs), writable(inputs)
            ops._scale_(got, factor)
            scans.scale_definition(want, factor)
            for a, b in zip(got, want):
                assert a.stride() == b.stride()
                assert_same_bits("scale", a.nan_to_num(7), b.nan_to_num(7), "differs from the definition")


def test_a_factor_of_one_writes_nothing(ops):
    payload = torch.full((600,), 0x7D01, dtype=torch.int16).view(torch.float16)  # a signaling NaN
    before = payload.view(torch.int16).clone()
    ops._scale_([payload], torch.ones((), dtype=torch.float16))
    assert torch.equal(payload.view(torch.int16), before) and ops.wide == 0


@each_dtype
def test_tensors_are_read_in_packets(ops, dtype):
    """Dense tensors are read 16 bytes at a time, in any order of dims and at any alignment of the first element."""
    size = dtype.itemsize
    aligned = torch.ones(16384 // size, dtype=dtype)
    shifted = torch.ones(16384 // size + 1, dtype=dtype)[1:]
    turned = torch.ones(64, 256 // size, dtype=dtype).t()
    for x, packets in ((aligned, 1024), (turned, 1024), (shifted, 1024 - 2 * 32)):
        health(ops._health_, [x])
        assert ops.wide >= packets
        ops._grad_norm([x], 2)
        assert ops.wide >= packets
        ops._scale_([x], torch.tensor(0.5))
        assert ops.wide >= packets
    health(ops._health_, [aligned[::2]])
    assert ops.wide == 0


def test_unusable_operands_are_refused(ops):
    x, rows = torch.ones(3), torch.zeros(4, 8, dtype=torch.int64)
    out = torch.zeros(4, 4, dtype=torch.float64)
    for call, words in (
        (lambda: ops._health_(rows, 3, [x, x]), "rows 3 to 5 of 4"),
        (lambda: ops._health_(rows, -1, [x]), "rows -1 to 0 of 4"),
        (lambda: ops._health_(rows.int(), 0, [x]), "contiguous rows of 8 int64"),
        (lambda: ops._health_(rows.t(), 0, [x]), "contiguous rows of 8 int64"),
        (lambda: ops._health_(rows, 0, [x.int()]), "must be float16"),
        (lambda: ops._pick_(out, 4, rows, 0, [x], [3]), "rows 4 to 5 of 4"),
        (lambda: ops._pick_(out, 0, rows, 4, [x], [3]), "rows 4 to 5 of 4"),
        (lambda: ops._pick_(out, 0, rows, 0, [x], [4]), "does not broadcast"),
        (lambda: ops._pick_(out, 0, rows, 0, [x.cfloat()], [3]), "real tensors"),
        (lambda: ops._grad_norm([x], 3), "no kernel for order 3"),
        (lambda: ops._scale_([x.expand(2, 3)], x[0]), "share memory"),
        (lambda: ops._scale_([x], x), "one element"),
    ):
        with pytest.raises(RuntimeError, match=words):
            call()

"""segment_sum, segment_mean, segment_max: what the contract's clauses do not cover."""

import itertools

import pytest
import torch

import safeops
from safeops.debug import audit
from safeops.ops.reductions._segment import _report, clamped
from tests.contract.common import DEVICE, each_route, grad_of, on, t, tensor
from tests.ops import definitions

INF, NAN = float("inf"), float("nan")
NAMES = "segment_sum", "segment_mean", "segment_max"
each_op = pytest.mark.parametrize("name", NAMES)


def cu(*bounds, dtype=torch.int64):
    return torch.tensor(bounds, dtype=dtype, device=DEVICE)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@each_op
@each_route
@pytest.mark.parametrize("shape", [(1000,), (700, 3), (300, 40), (90, 1500), (40, 5000), (200, 2, 3)])
def test_any_width(name, route, shape):
    """Results are right for empty, short and long sequences and for any number of columns."""
    x, rows = random(*shape), shape[0]
    bounds = cu(0, 1, 1, rows // 3, rows, rows)
    mask = random(*shape, seed=1) > -1
    x[~mask] = NAN
    x.requires_grad_()
    value = on(route, name)(x, cu_seqlens=bounds, mask=mask)
    leaf = x.detach().double().requires_grad_()
    want = getattr(definitions, name)(leaf, cu_seqlens=bounds, mask=mask)
    grad = random(*want.shape, seed=2)
    torch.testing.assert_close(value.detach().double(), want.detach(), rtol=2e-6, atol=2e-5)
    (d,), (w,) = torch.autograd.grad(value, x, grad), torch.autograd.grad(want, leaf, grad.double())
    torch.testing.assert_close(d.double(), w, rtol=2e-6, atol=1e-6)


@each_op
@pytest.mark.parametrize("columns", [1, 3, 512, 1100])
def test_a_sequence_has_the_same_bits_anywhere(name, columns):
    """A sequence's place, its neighbors, its ids and the number of threads do not change a bit of its result."""
    x, function = random(6000, columns, dtype=torch.bfloat16), getattr(safeops, name)
    first, last = 601, 5902
    alone = function(x[first:last], cu_seqlens=cu(0, last - first))
    among = function(x, cu_seqlens=cu(0, 5, first, last, 6000))
    assert torch.equal(alone[0], among[2])
    place = torch.arange(6000, device=DEVICE)
    ids = torch.where((place >= first) & (place < last), 1, 0)
    assert torch.equal(alone[0], function(x, segment_ids=ids, num_segments=2)[1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(among, function(x, cu_seqlens=cu(0, 5, first, last, 6000)))
    finally:
        torch.set_num_threads(threads)


@each_op
@each_route
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_ids_are_the_rows_sorted_by_them(name, route, kind):
    x = random(500, 7)
    ids = torch.randint(0, 9, (500,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    ids[ids == 4] = 5  # sequence 4 is empty
    order = ids.argsort(stable=True)
    bounds = torch.cat([cu(0), torch.bincount(ids, minlength=9).cumsum(0)]).to(kind)
    function, leaf, sorted_leaf = on(route, name), x.clone().requires_grad_(), x[order].requires_grad_()
    value = function(leaf, segment_ids=ids.to(kind), num_segments=9)
    want = function(sorted_leaf, cu_seqlens=bounds)
    assert torch.equal(value, want) and not value[4].any()
    grad = random(9, 7, seed=1)
    d, w = torch.autograd.grad(value, leaf, grad)[0], torch.autograd.grad(want, sorted_leaf, grad)[0]
    assert torch.equal(d[order], w)


@each_op
def test_layouts_of_bounds_and_ids(name):
    x, function = random(6, 2), getattr(safeops, name)
    want = function(x, cu_seqlens=cu(0, 2, 6))
    apart = cu(0, 9, 2, 9, 6)[::2]
    ids = torch.tensor([[0, 7], [0, 7], [1, 7], [1, 7], [1, 7], [1, 7]], device=DEVICE)[:, 0]
    assert torch.equal(function(x, cu_seqlens=apart), want)
    assert torch.equal(function(x, segment_ids=ids, num_segments=2), want)
    assert torch.equal(function(x, cu_seqlens=cu(0, 2, 6), num_segments=2), want)
    one = function(x, segment_ids=torch.zeros((), dtype=torch.int64, device=DEVICE).expand(6), num_segments=1)
    assert torch.equal(one, function(x, cu_seqlens=cu(0, 6)))


@each_route
def test_long_sequences_are_added_up_exactly(route):
    """Long sequences must not be summed one by one in fp32 (off by 1e-3), nor counted in fp32 (stuck at 2^24)."""
    x = torch.full((1 << 21, 1), 0.1, device=DEVICE)
    value = on(route, "segment_sum")(x, cu_seqlens=cu(0, 7, 1 << 21))
    want = x.double()[7:].sum(0)
    assert abs(value[1].double() / want - 1) < 2e-7
    mean = on(route, "segment_mean")(torch.ones((1 << 24) + 2, device=DEVICE), cu_seqlens=cu(0, 1, (1 << 24) + 2))
    assert torch.equal(mean, tensor([1.0, 1.0]))


@each_route
def test_half_is_summed_in_fp32(route):
    x = torch.full((4096, 2), 6e4, dtype=torch.float16, device=DEVICE)
    value = on(route, "segment_sum")(x, cu_seqlens=cu(0, 4096))
    assert value.dtype == torch.float32 and value[0, 0] == 4096 * x.double()[0, 0]


@each_op
@each_route
def test_a_nan_stays_in_its_sequence(name, route):
    """A NaN must stay in its sequence: as differences of cumulative sums, all later sequences would be NaN."""
    x = t(1.0, NAN, 3.0, INF, 5.0, 6.0)
    value = on(route, name)(x, cu_seqlens=cu(0, 1, 3, 4, 6))
    assert value[0] == 1 and value[1].isnan() and value[2] == INF and value[3].isfinite()


@each_op
@each_route
def test_nothing_kept(name, route):
    x, function = t(1.0, 2.0, NAN, grad=True), on(route, name)
    mask = torch.tensor([True, True, False], device=DEVICE)
    for empty, nothing in (("zero", 0.0), ("nan", NAN)):
        value = function(x, cu_seqlens=cu(0, 0, 2, 3), mask=mask, empty=empty)
        torch.testing.assert_close(value[[0, 2]], tensor([nothing] * 2), equal_nan=True)
        assert grad_of(value.nansum(), x)[2] == 0 and value[1] > 0
    with pytest.raises(ValueError, match=f'{name}: empty="raise": nothing is kept for 2 of 3 results'):
        function(x, cu_seqlens=cu(0, 0, 2, 3), mask=mask, empty="raise")
    assert function(x, cu_seqlens=cu(0, 2, 3), empty="raise").shape == (2,)
    for rows, bounds in ((0, (0,)), (0, (0, 0)), (2, (0, 0, 2))):
        x = torch.ones(rows, 3, device=DEVICE, requires_grad=True)
        value = function(x, cu_seqlens=cu(*bounds))
        assert value.shape == (len(bounds) - 1, 3) and grad_of(value.sum(), x).shape == x.shape
        assert function(x[:, :0], cu_seqlens=cu(*bounds)).shape == (len(bounds) - 1, 0)


@each_route
def test_ties_share_the_gradient(route):
    x = t(2.0, 2.0, 1.0, NAN, NAN, 3.0, grad=True)
    for weight in (None, t(1.0, 5.0, 1.0, 1.0, -2.0, 1.0)):
        value = on(route, "segment_max")(x, cu_seqlens=cu(0, 3, 6), weight=weight)
        (d,) = torch.autograd.grad(value, x, t(4.0, 6.0))
        assert torch.equal(d, t(2.0, 2.0, 0.0, 3.0, 3.0, 0.0)) and value[0] == 2 and value[1].isnan()


@each_route
def test_weights(route):
    x, w = t(1.0, 2.0, NAN, 4.0), t(1.0, 3.0, 0.0, 2.0)
    mean = on(route, "segment_mean")(x, cu_seqlens=cu(0, 2, 4), weight=w)
    assert torch.equal(mean, t(1.75, 4.0))
    tiny = t(1e-30, 1e-30, dtype=torch.float64)
    x = t(1.0, 3.0, grad=True)
    mean = on(route, "segment_mean")(x, cu_seqlens=cu(0, 2), weight=tiny)
    assert mean == 2 and torch.equal(grad_of(mean.sum(), x), t(0.5, 0.5))


@each_op
def test_wrong_bounds_are_refused_before_any_work(name):
    """Wrong bounds must be an error, also of the raw op. (Where a check would wait for a GPU, bounds are clamped
    instead.)"""
    function, x = getattr(safeops, name), random(4, 2)
    wrong = {
        (1, 4): "must start at 0, got 1",
        (0, 3, 2, 4): "must not decrease, got 3 and then 2 at 2",
        (0, -1, 4): "must not decrease",
        (0, 3): r"must end at the 4 rows of input \(4, 2\), got 3",
        (0, 5): "must end",
    }
    for bounds, words in wrong.items():
        for kind in (torch.int32, torch.int64):
            with pytest.raises(ValueError, match=f"{name}: cu_seqlens {words}"):
                function(x, cu_seqlens=cu(*bounds, dtype=kind))
        with pytest.raises(RuntimeError, match="cu_seqlens must start at 0"):
            getattr(torch.ops.safeops, f"_{name}").default(x, None, None, cu(*bounds))
    with pytest.raises(IndexError, match=f"{name}: segment id 7 is out of range for num_segments=2"):
        function(x, segment_ids=cu(0, 7, 1, 1), num_segments=2)
    with pytest.raises(IndexError, match=f"{name}: segment id 0 is out of range for num_segments=0"):
        function(x, segment_ids=cu(0, 0, 0, 0), num_segments=0)


@each_op
def test_under_transforms_such_rows_do_not_exist(name):
    """Under a transform the composite leaves out rows outside the bounds, as the GPU's kernel and composite do."""
    x = random(6, 2)
    x[0], x[4:] = NAN, NAN

    def value(x, bounds):
        return getattr(safeops, name)(x, cu_seqlens=bounds)

    want = getattr(safeops, name)(x[1:4], cu_seqlens=cu(0, 2, 2, 3))
    for bounds in ((1, 3, 3, 4), (1, 3, 2, 4)):
        got, d = torch.func.vjp(lambda x: value(x, cu(*bounds)), x)  # noqa: B023
        torch.testing.assert_close(got, want)
        (slope,) = d(torch.full_like(got, NAN))
        assert not slope[0].any() and not slope[4:].any() and slope[1:4].isnan().any()
    assert clamped(cu(-3, 9, 2, 4), 6).tolist() == [0, 6, 6, 6]

    def by_ids(x):
        return getattr(safeops, name)(x, segment_ids=cu(-1, 0, 0, 2, 3, 7), num_segments=3)

    torch.testing.assert_close(torch.func.vjp(by_ids, x)[0], want)


def test_what_no_host_refuses_is_reported():
    """Audit reports each row that a GPU leaves out without an error."""
    for arguments in ((cu(0, 5, 3, 6), None, None), (cu(1, 6), None, None), (cu(0, 4), None, None),
                      (None, cu(0, 9, -1), 2)):  # fmt: skip
        with audit(["index-range"]) as report:
            _report(*arguments, 3 if arguments[0] is None else 6)
        assert report.findings, arguments
    with audit(["index-range"]) as report:
        _report(cu(0, 2, 6), None, None, 6)
        _report(None, cu(0, 1, 1), 2, 3)
    assert not report.findings


@each_op
def test_what_is_saved(name):
    """Backward's saved tensors are a few numbers per sequence, and bounds or ids, but not the ids' sorted order;
    segment_max also saves its input."""
    kept = []
    x = random(1000, 4).requires_grad_()
    ids = torch.arange(1000, device=DEVICE) // 100
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        value = getattr(safeops, name)(x, segment_ids=ids, num_segments=10)
    others = [k for k in kept if k.data_ptr() not in (x.data_ptr(), ids.data_ptr())]
    assert sum(k.nbytes for k in others) <= 8 * 11 + 12 * value.numel()
    assert (x.data_ptr() in [k.data_ptr() for k in kept]) == (name == "segment_max")


@each_op
def test_compiled_with_ids(name):
    x, ids = random(60, 2).requires_grad_(), torch.arange(60, device=DEVICE) * 7 % 60 // 20
    compiled = torch.compile(getattr(safeops, name), fullgraph=True, backend="aot_eager")
    want = getattr(safeops, name)(x, segment_ids=ids, num_segments=3)
    got = compiled(x, segment_ids=ids, num_segments=3)
    assert torch.equal(got, want)
    assert torch.equal(grad_of(got.sum(), x), grad_of(want.sum(), x))


def test_every_derivative():
    """First and second derivatives, to input and weight, are right for sequences given by bounds and by ids."""
    x, w = random(7, 2, dtype=torch.float64).requires_grad_(), (random(7, 1, seed=1, dtype=torch.float64).abs() + 0.5)
    ways = {"cu_seqlens": cu(0, 3, 3, 7)}, {"segment_ids": cu(0, 2, 0, 2, 2, 0, 2), "num_segments": 3}
    for name, rows in itertools.product(NAMES, ways):

        def call(x, w):
            return getattr(safeops, name)(x, weight=w, **rows)  # noqa: B023

        inputs = (x, w.clone().requires_grad_(name != "segment_max"))
        assert torch.autograd.gradcheck(call, inputs) and torch.autograd.gradgradcheck(call, inputs)

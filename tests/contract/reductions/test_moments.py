"""Variances, deviations and logarithms of sums where plain formulas lose digits, overflow or have no gradient."""

import math

import pytest
import torch

from safeops.core.op import registry
from safeops.ops.reductions._statistic import EQUAL, EXP, EXTREME, LINEAR, SIGN, Statistic, define, define_backward
from safeops.ops.reductions.masked_norm import norm
from safeops.testing import DTYPES
from tests.contract.common import DEVICE, each_route, grad_of, on, tensor

INF, NAN = math.inf, math.nan


# ---- digits


@each_route
@pytest.mark.parametrize("shape, dim", [((2**17,), None), ((64, 4096), 1), ((4096, 64), 0), ((16, 512, 16), (0, 1))])
def test_variance_far_from_zero_keeps_three_digits_more_than_the_textbook_formula(route, shape, dim):
    torch.manual_seed(0)
    x = (1000 + torch.randn(shape, dtype=torch.float64)).float().to(DEVICE)
    axes = tuple(range(x.dim())) if dim is None else dim
    want = x.double().var(axes)
    textbook = x.square().mean(axes) - x.mean(axes).square()
    ours = on(route, "masked_var")(x, dim=dim)

    def worst(got):
        return float((got.double() / want - 1).abs().max())

    assert worst(ours) < 2e-6 and worst(ours) < worst(textbook) / 1000
    assert worst(on(route, "masked_std")(x, dim=dim).square()) < 2e-6


@each_route
def test_the_gradient_of_a_variance_far_from_zero(route):
    torch.manual_seed(0)
    x = (1000 + torch.randn(64, 33, dtype=torch.float64)).float().to(DEVICE).requires_grad_()
    wide = x.detach().double().requires_grad_()
    for name, plain in (("masked_var", wide.var(1)), ("masked_std", wide.std(1))):
        got, want = grad_of(on(route, name)(x, dim=1).sum(), x), grad_of(plain.sum(), wide)
        # `want` is of the rounded x. (Rounding x moves it by up to 3e-5 of its deviation: far more than this bound.)
        assert float((got.double() - want).abs().max() / want.abs().max()) < 1e-6


def _truth(x, weight, dim, correction=0):
    x, w = x.double(), weight.double()
    mean = (w * x).sum(dim, keepdim=True) / w.sum(dim, keepdim=True)
    return (w * (x - mean).square()).sum(dim) / (w.sum(dim) - correction)


@each_route
@pytest.mark.parametrize("place", [0, 1, -1])
@pytest.mark.parametrize("dtype, far, light", [(torch.float32, 1e3, 1e-6), (torch.float32, 1e4, 1e-10),
                                               (torch.float64, 1e8, 1e-20)])  # fmt: skip
@pytest.mark.parametrize("shape, dim", [((3, 1), 0), ((32,), 0), ((7, 33), 1), ((300, 5), 0), ((3, 5000), 1)])
def test_an_element_far_away_of_little_weight(route, place, dtype, far, light, shape, dim):
    """An outlier of little weight must not become the pivot that all elements are subtracted from: the differences of
    the other elements would lose their digits."""
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype), torch.ones(shape, dtype=dtype)
    x.select(dim, place).fill_(far), weight.select(dim, place).fill_(light)
    if shape[dim] > 2000:  # the row's first chunk has only such elements
        x[:, :1024], weight[:, :1024] = far, light
    x, weight = x.to(DEVICE).requires_grad_(), weight.to(DEVICE)
    wide = x.detach().double().requires_grad_()
    for name, power in (("masked_var", 1), ("masked_std", 0.5)):
        value, want = on(route, name)(x, weight=weight, dim=dim, correction=0), _truth(wide, weight, dim) ** power
        assert torch.allclose(value.double(), want, rtol=3e-6 if dtype == torch.float32 else 1e-5), name
        got, right = grad_of(value.sum(), x).double(), grad_of(want.sum(), wide)
        assert float((got - right).abs().max()) <= 1e-5 * float(right.abs().max()), name


@each_route
@pytest.mark.parametrize("size", [1e25, 1e-25])
@pytest.mark.parametrize("shape", [(40,), (5000, 3), (2, 3000)])
def test_a_mean_whose_square_leaves_the_range(route, size, shape):
    """The squares must neither overflow nor vanish where a first element of 1e25 or 1e-25, the pivot, is far away."""
    x = torch.zeros(shape)
    dim = 0 if len(shape) == 2 and shape[0] > 2 else -1
    x.select(dim, 0).fill_(size), x.select(dim, 1).fill_(-size / 2)
    x = x.to(DEVICE).requires_grad_()
    wide = x.detach().double().requires_grad_()
    value, want = on(route, "masked_std")(x, dim=dim), wide.std(dim)
    assert torch.allclose(value.double(), want, rtol=3e-6, atol=0)
    got, right = grad_of(value.sum(), x).double(), grad_of(want.sum(), wide)
    assert float((got - right).abs().max()) <= 1e-5 * float(right.abs().max())


@each_route
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("value", [0.1, -1e3 / 3, 1e-30, 3e30])
def test_equal_elements_have_a_deviation_of_exactly_zero(route, weighted, value):
    x = torch.full((7, 37), value, device=DEVICE, requires_grad=True)
    weight = torch.linspace(0.1, 3, 37, device=DEVICE) if weighted else None
    for dim in (None, 1, 0):
        for name in ("masked_var", "masked_std"):
            value = on(route, name)(x, dim=dim, weight=weight)
            assert (value == 0).all(), (name, dim)
            assert (grad_of(value.sum(), x) == 0).all(), (name, dim)


@each_route
@pytest.mark.parametrize("by", ["mask", "weight", "both"])
@pytest.mark.parametrize("length", [100, 1000, 4000])
def test_equal_elements_among_others_that_are_masked_out(route, length, by):
    """Equal kept elements have variance 0: a second pass, with another pivot, must skip the masked elements too."""
    torch.manual_seed(0)
    keep = torch.rand(3, length, device=DEVICE) < 0.5
    keep[:, 0], keep[:, 1] = False, True
    x = torch.where(keep, 0.1, torch.randn(3, length, device=DEVICE)).requires_grad_()
    weight = None if by == "mask" else torch.where(keep, 0.7, 0) if by == "weight" else torch.full_like(x, 0.7)
    mask = None if by == "weight" else keep
    for name in ("masked_var", "masked_std"):
        for row in (x, x.double()):
            value = on(route, name)(row, mask, 1, weight=weight)
            assert (value == 0).all(), name
            assert (grad_of(value.sum(), x) == 0).all(), name


# ---- what has no value


@each_route
def test_a_kept_nan_shows_where_there_is_too_little_for_the_correction(route):
    for bad in (NAN, INF):
        x = tensor([[bad], [5.0]]).requires_grad_()
        for name in ("masked_var", "masked_std"):
            value = on(route, name)(x, dim=1)
            assert value[0].isnan() and value[1] == 0
            dx = grad_of(value.sum(), x)
            assert dx[0].isnan() and dx[1] == 0


@each_route
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_negative_frequency_shows(route, dtype, dim):
    x, w = torch.randn(5, 700, device=DEVICE).to(dtype), torch.rand(5, 700, device=DEVICE).to(dtype) + 0.1
    at, mask = (2, 350), torch.ones(5, 700, dtype=torch.bool, device=DEVICE)
    w[at], mask[at] = -1, False
    for name in ("masked_var", "masked_std"):
        bad = on(route, name)(x, weight=w, dim=dim).isnan()
        assert bad.sum() == 1 and bad[at[1 - dim]]
        assert on(route, name)(x, mask, weight=w, dim=dim).isfinite().all()


@each_route
@pytest.mark.parametrize("name", ["masked_var", "masked_std"])
@pytest.mark.parametrize("empty, want", [("zero", 0.0), ("nan", NAN)])
def test_too_little_for_the_correction_follows_the_policy(route, name, empty, want):
    x = tensor([[5.0, 7.0, NAN], [1.0, NAN, NAN], [NAN, NAN, NAN]]).requires_grad_()
    got = on(route, name)(x, ~x.isnan(), 1, empty=empty)
    torch.testing.assert_close(got[1:], tensor([want, want]), rtol=0, atol=0, equal_nan=True)
    grad = grad_of(got[0] + 0 * got[1:].detach().nan_to_num().sum(), x)
    assert (grad[1:] == 0).all()
    upstream = tensor([1.0, 1.0, 1.0])
    (grad,) = torch.autograd.grad(on(route, name)(x, ~x.isnan(), 1, empty=empty), x, upstream)
    assert (grad[1:] == 0).all() and grad[0, 0] < 0 < grad[0, 1]
    light = tensor([0.25, 0.25, 1.0])  # weights that sum to less than the correction 1
    assert on(route, name)(x[0], ~x[0].isnan(), weight=light, correction=1) == 0
    assert on(route, name)(x[0], ~x[0].isnan(), weight=light, correction=0) > 0
    with pytest.raises(ValueError, match="nothing is kept for 2 of 3 results"):
        on(route, name)(x, ~x.isnan(), 1, empty="raise")


@each_route
@pytest.mark.parametrize("name", ["masked_var", "masked_std"])
@pytest.mark.parametrize("upstream", [NAN, INF])
def test_no_upstream_gradient_reaches_what_has_no_slope(route, name, upstream):
    """An upstream gradient of NaN or inf gives gradient 0 to rows with one kept element or none and, for masked_std, to
    rows of equal elements; rows are contiguous or strided."""
    masks = [[True, False, False, False], [False] * 4] + [[True] * 4] * (name == "masked_std")
    for mask in (tensor([m], torch.bool) for m in masks):
        for rows in (1, 3, 300):
            x = torch.full((rows, 4), 0.3, device=DEVICE, requires_grad=True)
            for laid, dim, keep in ((x, 1, mask), (x.t(), 0, mask.t())):
                for create_graph in (False, True):
                    value = on(route, name)(laid, keep, dim)
                    (dx,) = torch.autograd.grad(value, x, torch.full_like(value, upstream), create_graph=create_graph)
                    assert (dx == 0).all(), (rows, dim)


# ---- logarithms of sums of exponentials


@each_route
@pytest.mark.parametrize("dtype", DTYPES)
def test_logsumexp_of_anything(route, dtype):
    f = on(route, "masked_logsumexp")
    large = float(torch.finfo(dtype).max)
    x = tensor([[large, -large, 0.0], [-INF, -INF, -INF], [-INF, 1.0, -INF], [INF, 1.0, -INF]], dtype).requires_grad_()
    got = f(x, dim=1)
    assert torch.equal(got.double(), torch.tensor([large, -INF, 1.0, INF], dtype=torch.float64, device=DEVICE))
    grad = grad_of(got.sum(), x)
    assert torch.equal(grad.double(), tensor([[1, 0, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0]], torch.float64))
    assert f(x[1], tensor([False] * 3, torch.bool)) == 0 and f(x[1], tensor([True, False, True], torch.bool)) == -INF


@each_route
@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_49724_logsumexp_of_inf(route, dtype):
    """Where elements are inf, they must share the gradient in proportion to their weights, not make it NaN."""
    f = on(route, "masked_logsumexp")
    for length in (0, 500):
        more = tensor([-INF, 3.0] * length, dtype)
        x = torch.cat([tensor([1.0, INF, INF, 0.0], dtype), more]).requires_grad_()
        weight = torch.cat([tensor([5.0, 3.0, 1.0, 2.0], dtype), more.exp()])
        for w, want in ((None, [0, 0.5, 0.5, 0]), (weight, [0, 0.75, 0.25, 0])):
            value = f(x, weight=w)
            assert value == INF
            assert grad_of(value, x).tolist() == want + [0] * len(more)
        assert grad_of(f(torch.stack([x, x], 1), dim=0).sum(), x).tolist() == [0, 1, 1, 0] + [0] * len(more)
    x = tensor([1.0, INF], dtype).requires_grad_()
    assert not grad_of(x.logsumexp(0), x).isfinite().all()


@each_route
@pytest.mark.parametrize("dtype, size", [(torch.float32, 1e17), (torch.float32, 1e30), (torch.float64, 1e17)])
def test_the_gradient_of_a_large_logsumexp(route, dtype, size):
    """Each of four equal elements gets a fourth of the gradient, although x + log 4 rounds to x."""
    for shape, dim in (((4,), None), ((4, 40), 0), ((40, 4), 1)):
        x = torch.full(shape, size, dtype=dtype, device=DEVICE).requires_grad_()
        got = grad_of(on(route, "masked_logsumexp")(x, dim=dim).sum(), x)
        assert torch.allclose(got, torch.full_like(got, 0.25), rtol=1e-6)
        plain = grad_of(torch.logsumexp(x, 0 if dim is None else dim).sum(), x)
        assert not torch.allclose(plain, torch.full_like(plain, 0.25), rtol=0.1)


# ---- the raw backward op that these reductions share


@pytest.mark.parametrize("kind", [LINEAR, EQUAL, EXP, SIGN, EXTREME])
@pytest.mark.parametrize("upstream", [NAN, INF])
def test_a_scale_of_zero_is_selected(kind, upstream):
    """Where a result's scale is 0 its gradient is 0, also under NaN or inf upstream, in kernel and definition."""
    x, origin, scale = tensor([[0.5, -2.0], [0.5, 1.0]]), tensor([0.5, 1.0]).double(), tensor([0.0, 0.5]).double()
    arguments = tensor([upstream, 2.0]), x, origin, scale, None, None, kind, [1]
    ours, plain = torch.ops.safeops._statistic_backward(*arguments), define_backward(*arguments)
    assert (ours[0] == 0).all() and ours[1].isfinite().all()
    torch.testing.assert_close(ours, plain)


STATISTICS = {p.raw[0]: p for op in registry.values() for p in (op, *op.parts) if isinstance(p, Statistic)}


@pytest.mark.parametrize("name", STATISTICS)
def test_kernel_and_definition_leave_backward_the_same(name):
    op, x = STATISTICS[name], torch.randn(4, 7, device=DEVICE)
    mask = torch.rand(4, 7, device=DEVICE) > 0.3
    mask[2] = False
    parameter = {None: 0.0, "ord": 2.0, "correction": 0.5}[op.keyword]
    results = getattr(torch.ops.safeops, name)(x, mask, None, [1], False, False, None, parameter)
    for got, want in zip(results, define(op.statistic, x, mask, None, (1,), False, False, torch.float32, parameter)):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(DEVICE != "cpu", reason="of the CPU's kernel")
def test_a_gradient_of_too_many_dims_is_refused():
    x, column = torch.ones(2, 3), torch.ones(2, 1)
    with pytest.raises(RuntimeError, match="too many dims"):
        torch.ops.safeops._statistic_backward(column, x, column.double(), column.double(), None, None, LINEAR, [1])


def test_a_norm_of_zero_has_no_slope_where_there_is_no_kernel():
    x = tensor([[0.0, 0.0], [3.0, 4.0]])
    value, origin, scale = define(norm, x, None, None, (1,), False, False, torch.float32, 2.0)
    assert value.tolist() == [0, 5] and scale.tolist() == pytest.approx([0, 0.2])
    dx = define_backward(tensor([NAN, 1.0]), x, origin, scale, None, None, LINEAR, [1])
    assert dx.tolist() == [[0, 0], pytest.approx([0.6, 0.8])]


@each_route
def test_the_logsumexp_of_nothing_vanishes_from_a_sum(route):
    """In circle loss, a class that occurs once has no positive: its term must be log(1 + exp(-inf)) = 0."""
    x = tensor([[0.5, -1.0, NAN], [2.0, 3.0, 300.0], [NAN, NAN, NAN]]).requires_grad_()
    mask = torch.tensor([[True, True, False], [False, False, False], [False, False, False]], device=DEVICE)
    for options in ({}, {"weight": torch.ones(3, device=DEVICE), "keepdim": True}):
        rows = on(route, "masked_logsumexp")(x, mask, 1, empty="-inf", **options)
        assert rows.flatten()[1:].tolist() == [-math.inf] * 2
        value = torch.nn.functional.softplus(rows + 80).mean()
        (grad,) = torch.autograd.grad(value, x)
        assert grad.count_nonzero() == 2 and value.item() == pytest.approx((80 + math.log(2.0166)) / 3, abs=0.2)
    with pytest.raises(ValueError, match="masked_logsumexp: empty must be .*-inf.*, got 'inf'"):
        on(route, "masked_logsumexp")(x, mask, 1, empty="inf")

"""Norms and extremes where numbers leave the range, tie, or have no slope."""

import math

import pytest
import torch

import safeops
from safeops.testing import DTYPES
from tests.contract.common import DEVICE, each_route, grad_of, on, tensor
from tests.pretended import gpu  # noqa: F401

INF, NAN = math.inf, math.nan


# ---- range


def error(got, want):
    return abs(float(got) / float(want) - 1)


@each_route
@pytest.mark.parametrize("dtype, size", [
    (torch.float32, 1e30), (torch.float32, 1e-30), (torch.float32, 1e38), (torch.float32, 1e-38),
    (torch.float64, 1e200), (torch.float64, 1e-200), (torch.float16, 6e4), (torch.float16, 1e-7),
    (torch.bfloat16, 1e30), (torch.bfloat16, 1e-30),
])  # fmt: skip
@pytest.mark.parametrize("shape, dim", [((45,), None), ((9, 45), 1), ((45, 9), 0)])
def test_squares_leave_the_range_and_the_result_does_not(route, dtype, size, shape, dim):
    torch.manual_seed(1)
    unit = (torch.rand(shape, dtype=torch.float64) - 0.5).to(DEVICE)
    x = (unit * size).to(dtype).requires_grad_()
    factor = 2.0 ** -round(math.log2(size))  # a power of two, which rounds nothing
    wide = x.detach().double() * factor
    keep = torch.rand(shape, device=DEVICE) > 0.2
    k = keep.double()
    axes = tuple(range(x.dim())) if dim is None else dim
    count = k.sum(axes, keepdim=True)
    norm = (wide.square() * k).sum(axes, keepdim=True).sqrt()
    mean = (wide * k).sum(axes, keepdim=True) / count
    std = ((wide - mean).square() * k).sum(axes, keepdim=True).div(count - 1).sqrt()
    rms = norm / count.sqrt()
    eps = 4e-6 if dtype != torch.float64 else 1e-13
    truth = {
        "masked_norm": (norm, wide / norm),
        "masked_rms": (rms, wide / (rms * count)),
        "masked_std": (std, (wide - mean) / (std * (count - 1))),
    }
    for name, (value, dx) in truth.items():
        got = on(route, name)(x, keep, dim=dim, keepdim=True)
        tiny = torch.finfo(got.dtype).smallest_normal  # a result below it has fewer digits
        assert ((got.double() * factor - value).abs() <= eps * value + 1e-7 * tiny * factor).all(), name
        grad = grad_of(got.sum(), x)
        assert (grad[~keep] == 0).all()
        step = torch.finfo(dtype).eps
        assert ((grad.double() - dx * k).abs() <= (eps + step) * (dx * k).abs() + 2e-6 * dx.abs().max()).all(), name


@each_route
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_whose_factors_leave_the_range_and_whose_value_does_not(route, dtype):
    factors_leave_the_range(on(route, "masked_norm"), dtype, DEVICE)


def test_on_a_gpu_the_definition_has_that_range_too(gpu):  # noqa: F811
    factors_leave_the_range(on("composite", "masked_norm"), torch.float32, gpu)


def factors_leave_the_range(norm, dtype, device):
    """Asserts that the gradient upstream * (x / norm) is right where upstream / norm leaves the dtype's range."""
    size = 1e-30 if dtype == torch.float32 else 1e-200
    x = torch.tensor([3 * size, 4 * size] * 20, dtype=dtype, device=device, requires_grad=True)
    for upstream in (1.0, 1e30, 1e-30):
        (dx,) = torch.autograd.grad(norm(x), x, torch.tensor(upstream, dtype=dtype, device=device))
        want = torch.tensor([0.6, 0.8] * 20, dtype=torch.float64) / math.sqrt(20) * upstream
        torch.testing.assert_close(dx.cpu().double(), want, rtol=1e-5, atol=0)


@each_route
@pytest.mark.parametrize("upstream", [1.0, 1e300, 1e-300])
@pytest.mark.parametrize("size", [1e-309, 1e-318, 1e-200, 4e307])
def test_norms_at_the_ends_of_fp64(route, upstream, size):
    """The gradient x / norm, of size 1, is right also where 1 / norm or the norm itself overflows fp64."""
    if route == "composite" and not 1e-309 <= upstream * size <= 1e308:
        return  # the composite's chain rule multiplies upstream by x
    x = tensor([3 * size, 4 * size], torch.float64).requires_grad_()
    unit = x.detach() / tensor(size, torch.float64)  # by a tensor: CUDA multiplies by a number's reciprocal, inf
    norm = unit.norm()
    wanted = {
        "safe_norm": unit / norm,
        "masked_norm": unit / norm,
        "masked_rms": unit / norm / math.sqrt(2),
        "masked_std": (unit - unit.mean()) / (unit[1] - unit[0]) * math.sqrt(2),
    }
    for name, dx in wanted.items():
        got = grad_of(on(route, name)(x) * upstream, x)
        if name == "safe_norm" and norm * size > torch.finfo(x.dtype).max:
            dx = 0 * dx  # saturated: no gradient
        torch.testing.assert_close(got, dx * upstream, rtol=1e-13, atol=0)


@each_route
@pytest.mark.parametrize("weight", [[-1.0, -1.0], [1.0, -3.0]])
@pytest.mark.parametrize("size", [1.0, 1e-200, 1e200])
def test_a_root_of_a_mean_with_weights_whose_sum_is_negative(route, weight, size):
    x, w = tensor([1.0, 2.0], torch.float64), tensor(weight, torch.float64)
    total = w.sum()
    root = ((w * x * x).sum() / total).sqrt()
    leaf = (x * size).requires_grad_()
    value = on(route, "masked_rms")(leaf, weight=w)
    torch.testing.assert_close(value / size, root, rtol=1e-13, atol=0)
    torch.testing.assert_close(grad_of(value, leaf), w * x / (root * total), rtol=1e-13, atol=0)


@each_route
@pytest.mark.parametrize("name, values, weight, upstream, want", [
    ("masked_norm", [3e-38, 4e-38], [1000.0, 1.0], 1.0, [31.5947, 0.0421263]),
    ("masked_sum_of_squares", [3e15, 4e15], [1e-20, 1.0], 1e-30, [6e-35, 8e-15]),
    ("masked_norm", [3e30, 4e30], [1e-12, 1e-12], 1e-6, [6e-13, 8e-13]),
])  # fmt: skip
def test_a_weight_meets_what_its_gradient_is_the_product_of_last(route, name, values, weight, upstream, want):
    x = tensor(values).requires_grad_()
    (dx,) = torch.autograd.grad(on(route, name)(x, weight=tensor(weight)), x, tensor(upstream))
    torch.testing.assert_close(dx, tensor(want), rtol=2e-5, atol=0)


@each_route
@pytest.mark.parametrize("name, ord", [("masked_amax", None), ("masked_amin", None), ("masked_norm", INF),
                                       ("masked_norm", -INF), ("safe_norm", INF)])  # fmt: skip
def test_a_gradient_that_is_not_finite_stays_with_the_extreme(route, name, ord):
    for dtype in DTYPES:
        x = tensor([[1.0, 3.0, -2.0], [3.0, 1.0, 3.0], [-4.0, 2.0, 5.0]] * 30, dtype).requires_grad_()
        value = on(route, name)(x, dim=1, **({} if ord is None else {"ord": ord}))
        grad = tensor([NAN, INF, 1.0] * 30, value.dtype)
        (dx,) = torch.autograd.grad(value, x, grad)
        extreme = (x.abs() if ord else x) == value.to(dtype)[:, None]
        assert torch.equal(dx != 0, extreme) and torch.equal(~dx.isfinite(), extreme & ~grad.isfinite()[:, None])


@each_route
@pytest.mark.parametrize("ord", [INF, -INF, 1, 2, -1])
def test_a_norm_that_does_not_fit_half_saturates_beside_an_infinity_too(route, ord):
    """A finite norm beyond half saturates, also beside an inf element, which a norm of ord -inf or -1 ignores."""
    half = torch.float16
    x = tensor([[1e5, 2e5], [-INF, 2e5], [-INF, INF]], torch.float32)
    value = on(route, "safe_norm")(x, dim=1, ord=ord, dtype=half)
    finite = [torch.linalg.vector_norm(row, ord).isfinite() for row in x.cpu()]
    assert value.tolist() == [65504.0 if fits else INF for fits in finite]


@each_route
def test_what_does_not_fit_is_infinite(route):
    x = tensor([3e38, 3e38])
    assert on(route, "masked_norm")(x) == INF and on(route, "masked_sum_of_squares")(x) == INF
    assert on(route, "masked_norm")(x, dtype=torch.float64) < INF
    assert error(on(route, "masked_rms")(x), 3e38) < 1e-6
    assert on(route, "masked_norm")(tensor([6e4, 6e4], torch.float16), dtype=torch.float16) == INF


@each_route
@pytest.mark.parametrize("ord", [1, 2, INF, 3])
def test_safe_norm_saturates_where_the_norm_does_not_fit(route, ord):
    for values, dtype, out in (
        ([1.7e308, 1.7e308, -1.7e308], torch.float64, torch.float64),
        ([3e38, -3e38, 3e38], torch.float32, torch.float32),
        ([6e4, 6e4, 1.0], torch.float16, torch.float16),
        ([1e30, 0.0, 1.0], torch.float32, torch.float16),
    ):
        for dim in (None, 0):
            x = tensor([values, [1.0, 2.0, 2.0]], dtype).T.contiguous().requires_grad_()
            value = on(route, "safe_norm")(x, dim=0, ord=ord, dtype=out)
            fits = ord == INF and dtype == out
            most = float(torch.finfo(out).max)
            assert float(value[0]) == (float(x.detach().abs().max()) if fits else most)
            if ord == 2:
                assert value[1] == 3
            dx = grad_of(value.sum(), x)
            assert fits or (dx[:, 0] == 0).all()
            assert (dx[2, 1] > 0) and dx.isfinite().all()
            x = x.detach().index_fill(0, tensor([1], torch.long), INF)
            assert on(route, "safe_norm")(x, dim=dim, ord=ord, dtype=out).isinf().all()  # inf: no saturation


@each_route
@pytest.mark.parametrize("weight", [1e30, 1e-30])
def test_weights_out_of_the_ordinary(route, weight):
    x, w = tensor([3.0, 4.0, 5.0] * 11), tensor([1.0, 2.0, 3.0] * 11) * weight
    wide, v = x.double(), w.double()
    rms = ((v * wide.square()).sum() / v.sum()).sqrt()
    assert error(on(route, "masked_rms")(x, weight=w), rms) < 1e-6
    assert error(on(route, "masked_norm")(x, weight=w), (v * wide.square()).sum().sqrt()) < 1e-6
    assert error(on(route, "masked_logsumexp")(x, weight=w), (v * wide.exp()).sum().log()) < 1e-6
    spread = (v * (wide - (v * wide).sum() / v.sum()).square()).sum() / v.sum()
    assert error(on(route, "masked_var")(x, weight=w, correction=0), spread) < 1e-6


@each_route
@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_share_evenly_in_both_orders(route, dtype):
    x = tensor([[2.0, 7.0, 7.0, 7.0, 7.0], [3.0, 3.0, 1.0, 0.0, 3.0]], dtype).requires_grad_()
    keep = tensor([[True, True, True, False, True], [True, True, True, True, True]], torch.bool)
    want = tensor([[0, 1 / 3, 1 / 3, 0, 1 / 3], [1 / 3, 1 / 3, 0, 0, 1 / 3]], torch.float64)
    for call in (
        lambda: on(route, "masked_amax")(x, keep, 1),
        lambda: -on(route, "masked_amin")(-x, keep, 1),
        lambda: on(route, "masked_norm")(-x, keep, 1, ord=INF),
    ):
        value = call()
        assert torch.equal(value.double(), tensor([7.0, 3.0], torch.float64))
        grad = torch.autograd.grad(value.sum(), x, create_graph=True)[0]
        assert torch.equal(grad.double(), want.to(dtype).double())
        # The gradient is linear in its upstream gradient, and depends on nothing else.
        value = call()
        upstream = torch.ones_like(value).requires_grad_()
        first = torch.autograd.grad(value, x, upstream, create_graph=True)[0]
        second = torch.autograd.grad(first[0, 1] * 3 + first[1, 2], (upstream, x), allow_unused=True)
        torch.testing.assert_close(second[0].double(), tensor([1.0, 0.0], torch.float64), rtol=1e-3, atol=0)
        assert second[1] is None or (second[1] == 0).all()


@each_route
def test_infinite_extremes_share_too(route):
    x = tensor([[INF, 1.0, INF], [-INF, -INF, -INF]]).requires_grad_()
    value = on(route, "masked_amax")(x, dim=1)
    assert value.tolist() == [INF, -INF]
    assert torch.equal(grad_of(value.sum(), x), tensor([[0.5, 0, 0.5], [1 / 3] * 3]))
    assert on(route, "masked_norm")(x, dim=1, ord=-INF).tolist() == [1.0, INF]


@each_route
def test_norm_of_order_one_has_no_slope_at_zero(route):
    x = tensor([0.0, -0.0, -2.0, 3.0]).requires_grad_()
    assert torch.equal(grad_of(on(route, "masked_norm")(x, ord=1), x), tensor([0.0, 0.0, -1.0, 1.0]))


@pytest.mark.parametrize("ord", [0, 0.5, 1, 2, 3, 10, -1, -2, INF, -INF])
@pytest.mark.parametrize("size", [1.0, 1e30, 1e-30])
def test_every_order_is_torchs_and_leaves_no_range(ord, size):
    torch.manual_seed(2)
    unit = torch.rand(33, dtype=torch.float64).to(DEVICE) + 0.5
    x = (unit * size).float().requires_grad_()
    wide = (x.detach().double() / size).requires_grad_()
    want = torch.linalg.vector_norm(wide, ord)
    got = safeops.safe_norm(x, ord=ord)
    assert error(got / size if ord else got, want) < 2e-6
    if ord:
        torch.testing.assert_close(grad_of(got, x).double(), grad_of(want, wide), rtol=1e-5, atol=1e-7)


@each_route
@pytest.mark.parametrize("name", ["safe_norm", "masked_norm"])
@pytest.mark.parametrize("values, ord, want, slopes", [
    ([1.0, 1e-30], -10, 1e-30, [0, 1]), ([1.0, 1e-30], -12, 1e-30, [0, 1]), ([1.0, 1e-30], -0.5, 1e-30, [1e-45, 1]),
    ([1e38, -1e-38], -5, 1e-38, [0, -1]), ([1e38, 1e-38], 5, 1e38, [1, 0]), ([INF, 2.0], -3, 2.0, [0, 1]),
    ([1.0, 0.5], -2000, 0.5, [0, 1]), ([1.9, 1.9], 1100, 1.9 * 2 ** (1 / 1100), [0.5 * 2 ** (1 / 1100)] * 2),
    ([1.5, 1.9], 2000, 1.9, [0, 1]), ([0.5, -0.5], -2000, 0.5 * 2 ** (-1 / 2000), [0.4998267293, -0.4998267293]),
    ([3.0, 2.0], 1e300, 3.0, [1, 0]), ([3.0, 2.0, -2.0], -1e300, 2.0, [0, 0.5, -0.5]),
    ([1e-30, 1e-30, 1e-30], 1 / 64, 1e-30 * 3.0**64, [3.0**63] * 3), ([0.0, 1.0], -2000, 0.0, [0, 0]),
])  # fmt: skip
def test_the_element_that_decides_is_the_unit_of_any_order(route, name, values, ord, want, slopes):
    for dtype, size in ((torch.float32, 1.0), (torch.float64, 1.0), (torch.float64, 2.0**-800), (torch.float64, 2e200)):
        x = tensor(values, dtype).mul(size).requires_grad_()
        want_sized = want * size
        for create_graph in (False, True):
            value = on(route, name)(x, ord=ord)
            (dx,) = torch.autograd.grad(value, x, create_graph=create_graph)
            assert float(value.detach()) == pytest.approx(want_sized, rel=1e-6, abs=0), dtype
            assert dx.tolist() == pytest.approx(slopes, rel=2e-4 if abs(ord) > 1e3 else 4e-6, abs=1e-44), dtype


@each_route
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_any_order_that_does_not_fit(route, dtype):
    x = tensor([[1.0, -1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]], dtype).requires_grad_()
    value = on(route, "safe_norm")(x, 1, ord=0.001)
    assert value.tolist() == [torch.finfo(value.dtype).max, 1] and grad_of(value.sum(), x).tolist() == [
        [0] * 4,
        [1] + [0] * 3,
    ]
    value = on(route, "masked_norm")(x, dim=1, ord=0.001)
    assert value.tolist() == [INF, 1] and grad_of(value.sum(), x).tolist() == [[INF, -INF, 0, INF], [1] + [0] * 3]


def test_a_negative_order_of_infinities():
    x = tensor([INF, -INF])
    assert safeops.masked_norm(x, ord=-2) == torch.linalg.vector_norm(x, -2) == INF
    assert safeops.masked_norm(x, ~x.isinf(), ord=-2) == 0


@pytest.mark.parametrize("ord", [0, 0.5, 1, 1.5, 2, 3, -1, INF, -INF])
def test_every_order_is_differentiable_at_zero(ord):
    x = tensor([0.0, 0.0, 3.0], torch.float64).requires_grad_()
    first = torch.autograd.grad(safeops.safe_norm(x, ord=ord), x, create_graph=True)[0]
    assert first.isfinite().all()
    if first.requires_grad:
        assert grad_of(first.sum(), x).isfinite().all()
    zeros = torch.zeros(3, device=DEVICE, requires_grad=True)
    assert safeops.safe_norm(zeros, ord=ord) == 0
    assert grad_of(safeops.safe_norm(zeros, ord=ord), zeros).isfinite().all()

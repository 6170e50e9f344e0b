"""safe_div where the quotient does not exist or does not fit: the stand-in, and a gradient of exactly 0."""

import math

import pytest
import torch

import safeops
from safeops.testing import DTYPES
from tests.contract.subjects import DEVICE, composite

INF, NAN = math.inf, math.nan
ROUTES = {"kernel": safeops.safe_div, "composite": composite(safeops.safe_div, "safe_div")}


def tensor(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def call(op, a, b, upstream, **options):
    a, b = a.requires_grad_(), b.requires_grad_()
    out = op(a, b, **options)
    return out.detach(), *torch.autograd.grad(out, (a, b), upstream.to(out.dtype))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_whatever_lies_over_a_vanishing_divisor_does_not_exist(route, dtype):
    a, b = tensor([NAN, INF, -INF, 0.0, 5.0] * 9, dtype), tensor([0.0, -0.0, 0.0, 0.0, 2.0] * 9, dtype)
    out, da, db = call(ROUTES[route], a, b, tensor([NAN, INF, NAN, 1.0, 1.0] * 9), fill_value=-3.0)
    assert torch.equal(out, tensor([-3.0, -3.0, -3.0, -3.0, 2.5] * 9, dtype))
    assert torch.equal(da, tensor([0.0, 0.0, 0.0, 0.0, 0.5] * 9, dtype))
    assert torch.equal(db, tensor([0.0, 0.0, 0.0, 0.0, -1.25] * 9, dtype))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quotient_that_does_not_fit_saturates_without_a_gradient(route, dtype):
    limit = torch.finfo(dtype).max
    a, b = tensor([limit, -limit, limit, 1.0] * 9, dtype), tensor([0.25, 0.25, -0.5, 0.5] * 9, dtype)
    out, da, db = call(ROUTES[route], a, b, tensor([NAN, INF, 1.0, 1.0] * 9))
    assert torch.equal(out, tensor([limit, -limit, -limit, 2.0] * 9, dtype))
    assert torch.equal(da, tensor([0.0, 0.0, 0.0, 2.0] * 9, dtype))
    assert torch.equal(db, tensor([0.0, 0.0, 0.0, -4.0] * 9, dtype))


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_kept_shows(route):
    a = tensor([NAN, 1.0, INF, -INF, INF, 1.0])
    b = tensor([2.0, NAN, 2.0, 2.0, INF, -INF])
    out = ROUTES[route](a, b)
    assert out[:2].isnan().all() and out[2] == INF and out[3] == -INF and out[4].isnan() and out[5] == 0


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_floor_lives_in_the_compute_dtype(route, dtype):
    subnormal = torch.finfo(dtype).smallest_normal / 4  # normal in fp32 for fp16, not for bf16
    out = ROUTES[route](tensor([1e-7], dtype), tensor([subnormal], dtype), dtype=torch.float32)
    kept = subnormal >= torch.finfo(torch.float32).tiny
    want = float(tensor([1e-7], dtype)) / float(tensor([subnormal], dtype)) if kept else 0.0
    assert float(out) == pytest.approx(want, rel=1e-6, abs=0)


@pytest.mark.parametrize("route", ROUTES)
def test_second_derivatives_and_tangents_stay_clean_over_a_vanishing_divisor(route):
    a = tensor([NAN, 3.0], torch.float64).requires_grad_()
    b = tensor([0.0, 2.0], torch.float64).requires_grad_()
    da, db = torch.autograd.grad(ROUTES[route](a, b).sum(), (a, b), create_graph=True)
    second = torch.autograd.grad((da + db).sum(), (a, b))
    assert torch.equal(second[0], tensor([0.0, -0.25], torch.float64))  # d/da (1/b - a/b^2)
    assert torch.equal(second[1], tensor([0.0, 0.5], torch.float64))  # d/db: -1/b^2 + 2a/b^3
    tangent = torch.func.jvp(
        ROUTES[route], (a, b), (tensor([NAN, 1.0], torch.float64), tensor([NAN, 0.0], torch.float64))
    )
    assert torch.equal(tangent[1], tensor([0.0, 0.5], torch.float64))


def test_a_number_divides_in_the_compute_dtype():
    x = tensor([1e-4], torch.float16)
    out = safeops.safe_div(x, 1e-8, dtype=torch.float32)  # 1e-8 is 0 in half
    assert float(out) == pytest.approx(float(x) / 1e-8, rel=1e-6)
    assert torch.equal(safeops.safe_div(x, 0.0), torch.zeros_like(x))


def test_masked_fill_keeps_the_bits_of_what_it_keeps():
    bits = torch.tensor(
        [0x7FC01234, 0x7F800000, -0x80000000, 0x00000001], dtype=torch.int32
    )  # a NaN payload, inf, -0, subnormal
    x, fill = bits.view(torch.float32).to(DEVICE), torch.tensor([False] * 4 + [True] * 4, device=DEVICE)
    out = safeops.masked_fill(torch.cat([x, x]), fill, NAN)
    assert torch.equal(out[:4].cpu().view(torch.int32), bits)
    assert out[4:].isnan().all()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slopes_overflow_only_where_they_do_not_fit(route, create_graph, dtype):
    far, most = (2.0**64, 2.0**127) if dtype == torch.float32 else (2.0**512, 2.0**1023)
    cases = [  # a, b, upstream
        (1.9 * most, 1.25, 1.0),
        (1.9 * most, 0.99, 1.0),
        (1.75 * most / far, 1 / far, 0.0),
        (1.75 * most / far, 1.5 / far, 0.0),
        (0.0, 1 / far, 0.0),
        (1.9 * most, far, 65536.0),
        (1.9 * most, -most, 1.9 * most),
        (1.0, far, far),
        (far, 1 / far / 4, 0.0),
        (1 / far, 1 / far, far / 2),
        (1 / most, 1.5, most),
    ]
    a, b, upstream = (tensor(list(column) * 9, dtype) for column in zip(*cases))
    a, b = a.requires_grad_(), b.requires_grad_()
    out = ROUTES[route](a, b)
    da, db = torch.autograd.grad(out, (a, b), upstream, create_graph=create_graph)
    for i, (x, y, g) in enumerate(cases * 9):
        largest = float(torch.finfo(dtype).max)
        assert float(out[i]) == pytest.approx(min(x / y, largest), rel=1e-6, abs=0), (x, y)
        want = (g / y, -(g / y) * (x / y)) if x / y <= largest else (0.0, 0.0)
        want = [w if abs(w) <= largest else math.copysign(INF, w) for w in want]
        assert [float(da[i]), float(db[i])] == pytest.approx(want, rel=1e-6, abs=0), (x, y, g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tangents_at_the_ends_of_the_range(dtype):
    inf, one, zero = (tensor([v], dtype) for v in (INF, 1.0, 0.0))
    tiny = tensor([torch.finfo(dtype).tiny * 1.03], dtype)
    for f, at in (
        (safeops.safe_reciprocal, inf),
        (safeops.safe_reciprocal, -inf),
        (safeops.safe_rsqrt, inf),
        (lambda b: safeops.safe_div(zero, b), inf),
        (lambda b: safeops.safe_div(zero, b), tiny),
        (lambda b: safeops.safe_div(one, b), inf),
    ):
        assert torch.func.jvp(f, (at,), (one,))[1].tolist() == [0]
        assert torch.func.grad(lambda x, f=f: f(x).sum())(at).tolist() == [0]
        x = at.clone().requires_grad_()
        (dx,) = torch.autograd.grad(f(x), x, create_graph=True)
        assert dx.tolist() == [0]
    a, b = tensor([3.0], dtype), tensor([-7.0], dtype)
    value, tangent = torch.func.jvp(safeops.safe_div, (a, b), (one, one))
    assert float(tangent) == pytest.approx(-1 / 7 - 3 / 49)

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
    assert float(out) == pytest.approx(want, rel=1e-6)


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

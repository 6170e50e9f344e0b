"""safe_div where the quotient does not exist or does not fit, and the reported failures that it answers."""

import functools
import math

import pytest
import torch

import safeops
from safeops.testing import DTYPES
from tests.contract.common import DEVICE, each_route, equal, leaf, on, t, tensor

INF, NAN = math.inf, math.nan


def call(op, a, b, upstream, **options):
    a, b = a.requires_grad_(), b.requires_grad_()
    out = op(a, b, **options)
    return out.detach(), *torch.autograd.grad(out, (a, b), upstream.to(out.dtype))


@each_route
@pytest.mark.parametrize("dtype", DTYPES)
def test_whatever_lies_over_a_vanishing_divisor_does_not_exist(route, dtype):
    a, b = tensor([NAN, INF, -INF, 0.0, 5.0] * 9, dtype), tensor([0.0, -0.0, 0.0, 0.0, 2.0] * 9, dtype)
    out, da, db = call(on(route, "safe_div"), a, b, tensor([NAN, INF, NAN, 1.0, 1.0] * 9), fill_value=-3.0)
    assert torch.equal(out, tensor([-3.0, -3.0, -3.0, -3.0, 2.5] * 9, dtype))
    assert torch.equal(da, tensor([0.0, 0.0, 0.0, 0.0, 0.5] * 9, dtype))
    assert torch.equal(db, tensor([0.0, 0.0, 0.0, 0.0, -1.25] * 9, dtype))


@each_route
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quotient_that_does_not_fit_saturates_without_a_gradient(route, dtype):
    limit = torch.finfo(dtype).max
    a, b = tensor([limit, -limit, limit, 1.0] * 9, dtype), tensor([0.25, 0.25, -0.5, 0.5] * 9, dtype)
    out, da, db = call(on(route, "safe_div"), a, b, tensor([NAN, INF, 1.0, 1.0] * 9))
    assert torch.equal(out, tensor([limit, -limit, -limit, 2.0] * 9, dtype))
    assert torch.equal(da, tensor([0.0, 0.0, 0.0, 2.0] * 9, dtype))
    assert torch.equal(db, tensor([0.0, 0.0, 0.0, -4.0] * 9, dtype))


@each_route
def test_what_is_kept_shows(route):
    a = tensor([NAN, 1.0, INF, -INF, INF, 1.0])
    b = tensor([2.0, NAN, 2.0, 2.0, INF, -INF])
    out = on(route, "safe_div")(a, b)
    assert out[:2].isnan().all() and out[2] == INF and out[3] == -INF and out[4].isnan() and out[5] == 0


@each_route
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_floor_lives_in_the_compute_dtype(route, dtype):
    subnormal = torch.finfo(dtype).smallest_normal / 4  # as an fp32 number: normal for fp16, subnormal for bf16
    out = on(route, "safe_div")(tensor([1e-7], dtype), tensor([subnormal], dtype), dtype=torch.float32)
    kept = subnormal >= torch.finfo(torch.float32).tiny
    want = float(tensor([1e-7], dtype)) / float(tensor([subnormal], dtype)) if kept else 0.0
    assert float(out) == pytest.approx(want, rel=1e-6, abs=0)


@each_route
def test_second_derivatives_and_tangents_stay_clean_over_a_vanishing_divisor(route):
    a = tensor([NAN, 3.0], torch.float64).requires_grad_()
    b = tensor([0.0, 2.0], torch.float64).requires_grad_()
    da, db = torch.autograd.grad(on(route, "safe_div")(a, b).sum(), (a, b), create_graph=True)
    second = torch.autograd.grad((da + db).sum(), (a, b))
    assert torch.equal(second[0], tensor([0.0, -0.25], torch.float64))  # d/da (1/b - a/b^2)
    assert torch.equal(second[1], tensor([0.0, 0.5], torch.float64))  # d/db: -1/b^2 + 2a/b^3
    tangent = torch.func.jvp(
        on(route, "safe_div"), (a, b), (tensor([NAN, 1.0], torch.float64), tensor([NAN, 0.0], torch.float64))
    )
    assert torch.equal(tangent[1], tensor([0.0, 0.5], torch.float64))


def test_a_number_divides_in_the_compute_dtype():
    x = tensor([1e-4], torch.float16)
    out = safeops.safe_div(x, 1e-8, dtype=torch.float32)  # 1e-8 rounds to 0 in half
    assert float(out) == pytest.approx(float(x) / 1e-8, rel=1e-6)
    assert torch.equal(safeops.safe_div(x, 0.0), torch.zeros_like(x))


@each_route
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
    out = on(route, "safe_div")(a, b)
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


def test_division_gradients_whose_factors_overflow():
    def both(a, b, g):
        """Returns [db of the kernel, db of the composite, which create_graph=True selects]."""
        a, b, g = t(a), t(b, grad=True), t(g)
        return [torch.autograd.grad(safeops.safe_div(a, b), b, g, create_graph=c)[0].item() for c in (False, True)]

    assert both(1.0, 1e-20, 0.0) == [0, 0]  # a / b^2 overflows
    assert both(0.0, 1e-34, 65536.0) == [0, 0]  # g / b overflows
    for a, b, g in (
        (1.0, 1e-20, 1e-10),
        (2e-38, 2e-38, 0.5),
        (1e-30, 1e30, 1e30),
        (1e30, 1e10, 1e-30),
        (1.7e37, 0.19873, -6.7e-41),
    ):
        a64, b64, g64 = (torch.tensor(v, dtype=torch.float32).double() for v in (a, b, g))
        expected = -(g64 * a64 / b64 / b64).float().item()
        rel = 1e-6 if abs(g) > 1e-38 else 1e-4  # g / b loses digits where g is subnormal
        assert both(a, b, g) == pytest.approx([expected, expected], rel=rel, abs=0)


def test_numbers_as_divisors():
    assert safeops.safe_div(t(1.0), 0.1, dtype=torch.float64).item() == 10
    assert safeops.safe_div(t(1.0, dtype=torch.float64), 0.1, dtype=torch.float32).item() == 10
    assert safeops.safe_div(t(3e38), 1e39).item() == pytest.approx(0.3)
    assert safeops.safe_div(t(1.0), True).item() == 1
    assert safeops.safe_div(torch.ones(2, dtype=torch.float16, device="meta"), 2.0).dtype == torch.float16


# ---- reported failures


def test_pytorch_4132_division_by_zero_overwritten_later():
    x, divisor = leaf([1.0, 1.0]), torch.tensor([0.0, 1.0], device=DEVICE)
    plain = x / divisor
    plain[0] = 0
    assert torch.autograd.grad(plain.sum(), x)[0][0].isnan()
    ours = safeops.safe_div(x, divisor)
    assert equal(ours, [0, 1]) and equal(torch.autograd.grad(ours.sum(), x)[0], [0, 1])


@pytest.mark.parametrize("eps", [1e-8, 1e-10])
def test_perceptual_similarity_139_eps_is_zero_in_half(eps):
    x = leaf([0.0, 1.0], torch.float16)
    norm = torch.tensor([0.0, 1.0], dtype=torch.float16, device=DEVICE)
    assert (x / (norm + eps))[0].isnan()
    ours = safeops.safe_div(x, norm, eps=eps)
    assert equal(ours, [0, 1]) and equal(torch.autograd.grad(ours.sum(), x)[0], [0, 1])


def test_pylate_239_tiny_eps_is_resolved_in_fp32():
    x = torch.tensor([1e-4], dtype=torch.float16, device=DEVICE)
    # The divisor is 5.96e-8, the smallest number of half: above the limit eps=1e-8, below the limit eps=1e-7.
    other = torch.tensor([5.96e-8], dtype=torch.float16, device=DEVICE)
    assert equal(safeops.safe_div(x, other, eps=1e-8, dtype=torch.float32), [float(x) / float(other)])
    assert equal(safeops.safe_div(x, other, eps=1e-7), [0])


def test_monai_product_of_two_small_variances():
    cross = torch.tensor([2e-4], dtype=torch.float16, device=DEVICE)
    small = torch.tensor([1e-5], dtype=torch.float16, device=DEVICE)
    assert not (cross * cross / (small * small)).isfinite().all()
    ratio = safeops.safe_div(cross, small, dtype=torch.float32) ** 2
    assert abs(float(ratio) / (float(cross) / float(small)) ** 2 - 1) < 1e-6


def test_pytorch_87979_forward_and_backward_in_the_same_arithmetic():
    x = leaf([1.0, 3.0], torch.bfloat16)
    other = torch.tensor([3.0, 7.0], dtype=torch.bfloat16, device=DEVICE)
    with torch.autocast(torch.device(DEVICE).type, dtype=torch.bfloat16):
        quotient = safeops.safe_div(x, other)
        assert quotient.dtype == torch.float32
    (grad,) = torch.autograd.grad(quotient.sum(), x)
    assert torch.equal(quotient, x.detach().float() / other.float())
    assert torch.equal(grad, (1 / other.float()).bfloat16())


@each_route
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_divisor_with_a_floor_keeps_its_position(route, dtype):
    a, b = tensor([1.0, 1.0, -3.0, NAN, 1.0, 0.0] * 9, dtype), tensor([0.0, -0.0, -0.25, 0.25, NAN, 4.0] * 9, dtype)
    out, da, db = call(on(route, "safe_div"), a, b, tensor([1.0] * 54), eps=0.5, fill_value=None)
    torch.testing.assert_close(out, tensor([2.0, 2.0, 6.0, NAN, NAN, 0.0] * 9, dtype), equal_nan=True)
    torch.testing.assert_close(da, tensor([2.0, 2.0, -2.0, 2.0, NAN, 0.25] * 9, dtype), equal_nan=True)
    torch.testing.assert_close(db[:3], tensor([0.0, 0.0, 0.0], dtype), equal_nan=True)
    assert db[4].isnan() and db[3::6].eq(0).all() and db[5] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reciprocal_with_a_floor(dtype):
    x = tensor([0.0, -0.25, -2.0, 4.0], dtype).requires_grad_()
    out = safeops.safe_reciprocal(x, eps=0.5, fill_value=None)
    torch.testing.assert_close(out, tensor([2.0, -2.0, -0.5, 0.25], dtype), equal_nan=True)
    (dx,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(dx, tensor([0.0, 0.0, -0.25, -0.0625], dtype), equal_nan=True)


def test_a_floor_below_half_is_one_of_fp32():
    """The floor 1e-8, which rounds to 0 in half, must be applied in fp32; the quotient 1e8 then saturates in half."""
    b = tensor([0.0, 2.0], torch.float16)
    assert safeops.safe_reciprocal(b, eps=1e-8, fill_value=None)[0] == 65504
    assert safeops.safe_reciprocal(b, eps=1e-8, fill_value=None, dtype=torch.float32)[0] == pytest.approx(1e8)


@each_route
def test_a_floor_that_the_dtype_does_not_hold(route):
    """A floor that is 0 in fp32 becomes the smallest positive number; one that is inf in fp32 makes all quotients 0."""
    for eps, small in ((1e-50, torch.finfo(torch.float32).max), (1e39, 0.0), (INF, 0.0)):
        a, b = tensor([1.0, -1.0, 1.0] * 9), tensor([0.0, -0.0, 2.0] * 9)
        out, da, db = call(on(route, "safe_div"), a, b, tensor([1.0] * 27), eps=eps, fill_value=None)
        kept = 0.5 if eps < 1 else 0.0
        assert torch.equal(out, tensor([small, -small, kept] * 9)) and da.isfinite().all() and db[:2].eq(0).all()
        assert torch.equal(safeops.safe_div(b.int() + 1, b.int(), eps=eps, fill_value=None)[:1], tensor([small]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_default_floor_is_that_of_the_tensor(dtype):
    """The default floor is fp32's smallest normal number, also for a divisor such as 1e-60 that fp32 does not hold."""
    a, floor = tensor([1.0], dtype), 1 / torch.finfo(torch.float32).tiny
    for number in (0.0, 1e-60, -1e-60):
        out = safeops.safe_div(a, number, fill_value=None, dtype=torch.float32)
        assert float(out) == math.copysign(floor, number if number else 1.0)


def test_a_floor_that_changes_from_call_to_call_is_compiled_once():
    """Compiled once for all eps, eps is a floor with fill_value=None, else a limit below which the quotient is 0."""
    a, b = tensor([1.0] * 4), tensor([0.0, -0.0, 1e-5, 2.0])
    compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    floor = compiled(lambda eps: (safeops.safe_div(a, b, eps=eps, fill_value=None),
                                  safeops.safe_reciprocal(b, eps=eps, fill_value=None)))  # fmt: skip
    limit = compiled(lambda eps: (safeops.safe_div(a, b, eps=eps),))
    for eps in (1e-3, 1e-2, 1e-1):
        for call, small in ((floor, 1 / eps), (limit, 0.0)):
            for out in call(eps):
                torch.testing.assert_close(out, tensor([small, small, small, 0.5]))

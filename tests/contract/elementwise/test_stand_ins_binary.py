"""Powers, angles and x log y where the value does not exist or does not fit the dtype."""

import math

import pytest
import torch

import safeops
from safeops.testing.compare import TOLERANCES
from tests.contract.common import DEVICE, each_route, on
from tests.contract.elementwise.stand_ins import above, assert_equal, below, call, compute, each_dtype, tensor
from tests.pretended import gpu  # noqa: F401

INF, NAN = math.inf, math.nan


# ---- powers


@each_route
@each_dtype
def test_powers_that_are_no_number_or_do_not_fit(route, dtype):
    largest = torch.finfo(dtype).max
    cases = [  # base, exponent, value, d/dbase, d/dexponent
        (-2.0, 0.5, 0.0, 0.0, 0.0),
        (-2.0, -1.5, 0.0, 0.0, 0.0),
        (-2.0, above(3.0, dtype), 0.0, 0.0, 0.0),
        (-2.0, below(3.0, dtype), 0.0, 0.0, 0.0),
        (-2.0, 3.0, -8.0, 12.0, 0.0),
        (-2.0, 2.0, 4.0, -4.0, 0.0),
        (-2.0, -1.0, -0.5, -0.25, 0.0),
        (-2.0, 0.0, 1.0, 0.0, 0.0),
        (-1.0, 1.0, -1.0, 1.0, 0.0),
        (0.0, -1.0, largest, 0.0, 0.0),
        (-0.0, -1.0, -largest, 0.0, 0.0),
        (-0.0, -2.0, largest, 0.0, 0.0),
        (0.0, -0.5, largest, 0.0, 0.0),
        (-0.0, -0.5, largest, 0.0, 0.0),
        (0.0, 0.0, 1.0, 0.0, 0.0),
        (-0.0, 0.0, 1.0, 0.0, 0.0),
        (0.0, 0.5, 0.0, 0.0, 0.0),
        (0.0, below(1.0, dtype), 0.0, 0.0, 0.0),
        (0.0, 1.0, 0.0, 1.0, 0.0),
        (0.0, above(1.0, dtype), 0.0, 0.0, 0.0),
        (0.0, 2.0, 0.0, 0.0, 0.0),
        (largest, 2.0, largest, 0.0, 0.0),
        (-largest, 3.0, -largest, 0.0, 0.0),
        (2.0, 1100.0 if dtype != torch.bfloat16 else 1104.0, largest, 0.0, 0.0),
        (2.0, 2.0, 4.0, 4.0, 4 * math.log(2)),
        (4.0, 0.5, 2.0, 0.25, 2 * math.log(4)),
        (4.0, 0.0, 1.0, 0.0, math.log(4)),
        (1.0, 5.0, 1.0, 5.0, 0.0),
    ]
    a, b, value, da, db = (list(column) for column in zip(*cases))
    got = call(route, "safe_pow", [tensor(a, dtype), tensor(b, dtype)])
    for what, g, w in zip(("value", "d/dbase", "d/dexponent"), got, (value, da, db)):
        for x, y, mine, true in zip(a, b, g, w):
            assert mine == pytest.approx(true, rel=4 * TOLERANCES[dtype][0], abs=0), f"{what} of {x} ** {y}"
    for upstream in (NAN, INF):
        grads = call(route, "safe_pow", [tensor(a, dtype), tensor(b, dtype)], upstream)[1:]
        stand_in = [x < 0 and y != int(y) or abs(v) == largest or (x == 0 and y < 1) for x, y, v in zip(a, b, value)]
        for grad in grads:
            assert all(g == 0 for g, none in zip(grad, stand_in) if none)
        # Where the slope is 0 by the formula, a NaN or inf upstream gradient must show (GradScaler looks for it).
        # Exception: exponent 0.
        shown = [not none and y != 0 for none, y in zip(stand_in, b)]
        assert [not math.isfinite(g) for g in grads[0]] == shown
        assert [not math.isfinite(g) for g in grads[1]] == [not none and x > 0 for none, x in zip(stand_in, a)]


@each_route
@each_dtype
def test_powers_of_what_is_not_finite_are_those_of_torch(route, dtype):
    pool = [INF, -INF, NAN, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -3.0, 4.0]
    grid = torch.cartesian_prod(*[torch.tensor(pool, dtype=torch.float64)] * 2)
    a, b = grid[~grid.isfinite().all(1)].unbind(1)
    got = on(route, "safe_pow")(a.to(dtype).to(DEVICE), b.to(dtype).to(DEVICE)).double().cpu()
    assert torch.equal(got.nan_to_num(123.0), a.pow(b).nan_to_num(123.0))


@each_route
@pytest.mark.parametrize("exponent", [2, 2.0, 3, 0.5, -1, -0.5, 0, 1, 2.5, 1e-3])
def test_number_exponents_equal_tensors(route, exponent):
    x = tensor([0.0, -0.0, -2.0, 0.25, 3.0, 0.5])
    number = call(route, "safe_pow", [x], exponent=exponent)
    other = torch.full((), exponent, dtype=torch.float32, device=DEVICE)
    same = call(route, "safe_pow", [x], exponent=other)
    assert number == same


@each_route
@pytest.mark.parametrize(
    "name, a, number, value, slope",
    [
        ("safe_pow", -1.0, 16777217, -1.0, 16777217.0),
        ("safe_pow", -1.0, 16777218, 1.0, -16777218.0),
        ("safe_pow", -1.0, 33554433.0, -1.0, 33554433.0),
        ("safe_pow", -1.0, 8388608.5, 0.0, 0.0),
        ("safe_pow", -2.0, 2.0000000001, 0.0, 0.0),
        ("safe_pow", 2.0, 0.1, 2**0.1, 0.1 * 2**-0.9),
        ("safe_pow", 0.0, 1e-50, 0.0, 0.0),
        ("safe_pow", 1.0, 1e50, 1.0, INF),
        ("safe_pow", 0.5, 1e300, 0.0, 0.0),
        ("xlogy", 1.0, 1e-50, math.log(1e-50), math.log(1e-50)),
        ("xlogy", 1.0, 1e-40, math.log(1e-40), math.log(1e-40)),
        ("xlogy", 2.0, 1e300, 2 * math.log(1e300), math.log(1e300)),
        ("xlogy", 1.0, 0.0, -INF, -INF),
        ("xlogy", 1.0, INF, INF, INF),
        ("safe_div", 2.0**126, 1e300, 0.0, 0.0),
        ("safe_div", 2.0**126, 1e39, 2.0**126 / 1e39, 1e-39),
        ("safe_div", 2.0, -INF, 0.0, 0.0),
        ("safe_div", 2.0, 1e-50, 7.0, 0.0),
        ("safe_div", 2.0, 1e-39, 7.0, 0.0),
    ],
)
def test_a_number_is_the_double_it_is(route, name, a, number, value, slope):
    options = {"fill_value": 7.0} if name == "safe_div" else {}
    for dtype in (torch.float32, torch.bfloat16):
        x = tensor([a], dtype)
        argument = "exponent" if name == "safe_pow" else "other"
        got = call(route, name, [x], **{argument: number}, **options)
        assert on(route, name)(x, number, **options).dtype == dtype
        assert_equal(got[0], [value], dtype)
        assert_equal(got[1], [slope], dtype)


def test_a_nan_is_a_number():
    x = tensor([0.0, 1.0])
    assert safeops.safe_div(x, NAN).isnan().all()
    for name in ("safe_pow", "xlogy"):  # 1 ** nan is 1, 0 log nan is 0
        assert getattr(safeops, name)(x, NAN).isnan().tolist() == [name == "safe_pow", name == "xlogy"] * 9


@each_route
@each_dtype
def test_a_power_whose_slope_overflows_meets_a_gradient_of_zero(route, dtype):
    """The slope of x^-1/2 at a small x overflows; times an upstream gradient of 0 it must be 0."""
    wide = compute(dtype)
    small = 2.0**-100 if wide == torch.float32 else 2.0**-700
    operands = [tensor([small, small, -small], wide), tensor([-0.5, 0.5, -1.0], wide)]
    value, da, db = call(route, "safe_pow", operands, 0.0)
    assert_equal(value, [small**-0.5, small**0.5, -1 / small], wide)
    assert da == [0, 0, 0] and db == [0, 0, 0]
    # An upstream gradient so small that its product with the slope fits: the gradient is that product.
    value, da, db = call(route, "safe_pow", operands, small)
    assert_equal(da, [-0.5 * small**-0.5, 0.5 * small**0.5, -1 / small], wide, extra=8)


# ---- angles


@each_route
@each_dtype
def test_angles_at_the_origin_and_around_it(route, dtype):
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest subnormal
    y = [0.0, -0.0, 0.0, -0.0, tiny, -tiny, 0.0, 0.0, 1.0, -1.0]
    x = [0.0, 0.0, -0.0, -0.0, 0.0, 0.0, tiny, -tiny, 0.0, 0.0]
    half, top = math.pi / 2, 1 / tiny if 1 / tiny <= torch.finfo(dtype).max else INF
    value = [0.0, 0.0, 0.0, 0.0, half, -half, 0.0, math.pi, half, -half]
    dy = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, top, -top, 0.0, 0.0]
    dx = [0.0, 0.0, 0.0, 0.0, -top, top, 0.0, 0.0, -1.0, 1.0]
    got = call(route, "safe_atan2", [tensor(y, dtype), tensor(x, dtype)])
    for g, w in zip(got, (value, dy, dx)):
        assert_equal(g, w, dtype)
    for upstream in (NAN, INF):
        for grad in call(route, "safe_atan2", [tensor(y, dtype), tensor(x, dtype)], upstream)[1:]:
            assert grad[:4] == [0, 0, 0, 0]
    for grad in call(route, "safe_atan2", [tensor(y, dtype), tensor(x, dtype)], 0.0)[1:]:
        assert grad == [0] * 10


@each_route
@pytest.mark.parametrize(
    "dtype, size",
    [
        (torch.float32, 2.0**100),
        (torch.float32, 2.0**-100),
        (torch.bfloat16, 2.0**100),
        (torch.float64, 2.0**900),
        (torch.float64, 2.0**-900),
    ],
)
def test_angle_gradients_neither_overflow_nor_vanish(route, dtype, size):
    value, dy, dx = call(route, "safe_atan2", [tensor([3 * size], dtype), tensor([4 * size], dtype)])
    assert_equal(value, [math.atan2(3, 4)], dtype)
    assert_equal(dy, [4 / 25 / size], dtype)
    assert_equal(dx, [-3 / 25 / size], dtype)


# ---- x log y


@each_route
@each_dtype
def test_a_zero_masks_its_logarithm_out(route, dtype):
    zero = [0.0, -0.0] * 3
    other = [NAN, INF, -INF, 0.0, -0.0, -1.0]
    for upstream in (1.0, NAN, INF):
        value, dx, dy = call(route, "xlogy", [tensor(zero, dtype), tensor(other, dtype)], upstream)
        assert value == [0] * 6 and dx == [0] * 6 and dy == [0] * 6
    # pytorch#80770: where log y is finite, the gradient to x is log y, also at x = 0.
    for upstream in (1.0, 0.0):
        value, dx, dy = call(route, "xlogy", [tensor([0.0, -0.0], dtype), tensor([0.5, 3.0], dtype)], upstream)
        assert value == [0, 0] and dy == [0, 0] and math.copysign(1, value[0]) == 1
        assert_equal(dx, [upstream * math.log(0.5), upstream * math.log(3)], dtype)
    _, dx, dy = call(route, "xlogy", [tensor([0.0], dtype), tensor([2.0], dtype)], NAN)
    assert math.isnan(dx[0]) and math.isnan(dy[0])
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the smallest subnormal masks nothing
    value, _, dy = call(route, "xlogy", [tensor([smallest, -smallest], dtype), tensor([0.0, 0.0], dtype)])
    assert value == [-INF, INF] and dy == [INF, -INF]
    value, dx, _ = call(route, "xlogy", [tensor([1.0, 1.0, 2.0], dtype), tensor([NAN, -1.0, 1.0], dtype)])
    assert math.isnan(value[0]) and math.isnan(value[1]) and value[2] == 0 and dx[2] == 0


@each_route
def test_the_slope_of_xlogy_by_a_tiny_operand(route):
    """The gradient to b, (g a) / b, is right where g a rounds to 0 or is 0, and where a / b overflows."""
    a, b = tensor([1e10, 1.0, 1e200, 1e10], torch.float64), tensor([1e-300, 5e-324, 1e-200, 1e-300], torch.float64)
    assert call(route, "xlogy", [a, b], 0.0)[2] == [0] * 4
    if route == "kernel":
        small = call(route, "xlogy", [a, b], 2.0**-1063)[2]
        assert small[0] == small[3] == pytest.approx(2.0**-1063 * 1e300 * 1e10, rel=1e-15)


# ---- derivatives beyond the first


@each_route
@pytest.mark.parametrize(
    "name, a, b",
    [
        ("safe_pow", [-2.0, 0.0, 0.0, 0.0, 1e300], [0.5, 0.5, -1.0, 1.5, 2.0]),
        ("safe_atan2", [0.0, -0.0], [0.0, -0.0]),
        ("xlogy", [0.0, -0.0, 0.0, 0.0], [0.0, NAN, -1.0, INF]),
    ],
)
def test_second_derivatives_and_tangents_of_two_operands(route, name, a, b):
    a, b = (torch.tensor(v, dtype=torch.float64, device=DEVICE, requires_grad=True) for v in (a, b))
    op = on(route, name)
    first = torch.autograd.grad(op(a, b).sum(), (a, b), create_graph=True)
    assert all(not g.any() for g in first)
    weight = torch.rand_like(a)
    second = torch.autograd.grad(sum((g * weight).sum() for g in first), (a, b), allow_unused=True)
    assert all(g is None or not g.any() for g in second)
    nan = torch.full_like(a, NAN).detach()
    tangent = torch.func.jvp(op, (a.detach(), b.detach()), (nan, nan))[1]
    slope = (b == 1.5) if name == "safe_pow" else torch.zeros_like(a, dtype=torch.bool)  # 0^1.5 has a true slope, 0
    assert tangent[slope].isnan().all() and not tangent[~slope].any()


SMALL = {torch.float32: [1e-30, 1e-38, 1e-40], torch.float64: [1e-160, 1e-300]}


OF_SMALL = ["safe_log", "safe_sqrt", "safe_rsqrt", "safe_reciprocal", "safe_pow", "safe_atan2"]
FACTORS = [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)]  # (the upstream gradient, the cotangent of the first gradient)


@each_route
@pytest.mark.parametrize("name", OF_SMALL)
@pytest.mark.parametrize("upstream, cotangent", FACTORS)
def test_second_derivatives_of_small_numbers_times_zero_are_zero(route, name, upstream, cotangent):
    second_derivatives_are_zero(on(route, name), name, upstream, cotangent, DEVICE)


@pytest.mark.parametrize("name", OF_SMALL)
def test_on_a_gpu_the_definition_is_as_wide(name, gpu):  # noqa: F811
    for upstream, cotangent in FACTORS:
        second_derivatives_are_zero(on("composite", name), name, upstream, cotangent, gpu)


def second_derivatives_are_zero(op, name, upstream, cotangent, device):
    """Second derivatives that overflow (1e-30: 1 / x^2 = 1e60) give 0 where the upstream or the cotangent is 0."""
    for dtype, sizes in SMALL.items():
        if dtype == torch.float64 and upstream == 0:
            continue  # 0 times a factor that overflows fp64: NaN
        sizes = [x for x in sizes if name in ("safe_pow", "safe_atan2") or x >= torch.finfo(dtype).tiny]
        x = torch.tensor(sizes, dtype=dtype, device=device, requires_grad=True)
        rest = [torch.full_like(x, v).requires_grad_() for v in (0.5, 0.0, 1.5, 2.0)] if name == "safe_pow" else [None]
        rest = [x.detach().flip(0).requires_grad_()] if name == "safe_atan2" else rest
        for other in rest:
            leaves = [x] if other is None else [x, other]
            out = op(*leaves)
            first = torch.autograd.grad(out, leaves, torch.full_like(out, upstream), create_graph=True)
            second = torch.autograd.grad(first, leaves, [torch.full_like(g, cotangent) for g in first])
            assert all((g == 0).all() for g in second), (dtype, sizes, second)


@pytest.mark.parametrize("base", [1e-310, 1e-160, 1e-40, 2.0])
def test_an_exponent_of_0_has_no_slope_by_the_base(base):
    a, b = (torch.tensor(v, dtype=torch.float64, device=DEVICE, requires_grad=True) for v in (base, 0.0))
    for upstream in (1.0, INF, NAN):
        first = torch.autograd.grad(safeops.safe_pow(a, b), (a, b), torch.full_like(a, upstream), create_graph=True)
        assert first[0] == 0
    assert torch.autograd.grad(safeops.safe_pow(a, b), b, create_graph=True)[0].item() == pytest.approx(math.log(base))
    hessian = torch.func.hessian(safeops.safe_pow, (0, 1))(a.detach(), b.detach())
    assert hessian[0][0] == 0 and hessian[1][1].item() == pytest.approx(math.log(base) ** 2)
    tangent = torch.func.jvp(safeops.safe_pow, (a.detach(), b.detach()), (torch.ones_like(a), torch.zeros_like(b)))[1]
    assert tangent == 0

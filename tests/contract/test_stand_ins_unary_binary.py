"""The unary and binary functions at their boundaries: the neighbouring numbers on each side, per dtype and route."""

import math

import pytest
import torch

import safeops
from safeops.testing import DTYPES
from safeops.testing.compare import TOLERANCES
from tests.contract.bad_calls_unary_binary import UNARY
from tests.contract.subjects import DEVICE, composite

INF, NAN = math.inf, math.nan
HALVES = (torch.float16, torch.bfloat16)
ROUTES = {
    "kernel": lambda name: getattr(safeops, name),
    "composite": lambda name: composite(getattr(safeops, name), name),
}
each_route = pytest.mark.parametrize("route", ROUTES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def tensor(values, dtype=torch.float32):
    """Nine times over, for the vector loops and their tails. Numbers that the dtype would round are not meant."""
    made = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert all(v != v or float(m) == v for v, m in zip(values, made)), "not exact in this dtype"
    return made.repeat(9).to(DEVICE)


def compute(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def near(x, dtype, towards):
    """The number of the dtype next to x."""
    x = torch.tensor(x, dtype=dtype)
    return float(torch.nextafter(x, torch.tensor(towards, dtype=dtype)))


def below(x, dtype):
    return near(x, dtype, -INF)


def above(x, dtype):
    return near(x, dtype, INF)


def call(route, name, operands, upstream=1.0, **options):
    """The value and the gradients, in Python numbers, once checked that each of the nine copies is the same: of a
    kernel to the bit, of torch's own functions, which have a vector loop and another for its tail, to rounding."""
    leaves = [x.clone().requires_grad_() for x in operands]
    out = ROUTES[route](name)(*leaves, **options)
    upstream = torch.full_like(out, upstream)
    grads = torch.autograd.grad(out, leaves, upstream)
    results = []
    for t in (out.detach(), *grads):
        copies = t.cpu().double().reshape(9, -1)
        rtol, atol = (0, 0) if route == "kernel" else TOLERANCES[t.dtype]
        torch.testing.assert_close(copies, copies[:1].expand(9, -1), rtol=rtol, atol=atol, equal_nan=True)
        results.append(copies[0].tolist())
    return results


def assert_equal(got, want, dtype, extra=1.0):
    """Up to one rounding of the dtype (and what the function itself loses), NaN and infinities in their places."""
    rtol, atol = TOLERANCES[dtype]
    for g, w in zip(got, want, strict=True):
        rounded = float(torch.tensor(w, dtype=torch.float64).to(dtype))
        same = g == rounded or (g != g and w != w) or abs(g - w) <= extra * rtol * abs(w) + atol
        assert same, f"got {got}, want {want}"


def check(route, name, operands, want, dtype, **options):
    """want: the value, then the gradients. A gradient that is 0 is a stand-in's, and stays 0 under NaN and inf."""
    got = call(route, name, operands, **options)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_equal(g, w, options.get("dtype", dtype) if i == 0 else dtype)
    for upstream in (NAN, INF, 0.0):
        for g, w in zip(call(route, name, operands, upstream, **options)[1:], want[1:]):
            assert all(value == 0 for value, true in zip(g, w) if true == 0 or upstream == 0), (upstream, g)


# A floor: log, sqrt, rsqrt, reciprocal -------------------------------------------------------------------------------
FLOORS = {  # value and slope above the floor, value below it
    "safe_log": (math.log, lambda x: 1 / x, lambda x, eps: math.log(eps)),
    "safe_sqrt": (math.sqrt, lambda x: 0.5 / math.sqrt(x), lambda x, eps: math.sqrt(max(x, 0.0))),
    "safe_rsqrt": (lambda x: x**-0.5, lambda x: -0.5 * x**-1.5, lambda x, eps: eps**-0.5),
    "safe_reciprocal": (lambda x: 1 / x, lambda x: -1 / x / x, lambda x, eps: -3.0),
}


@each_route
@each_dtype
@pytest.mark.parametrize("name", FLOORS)
@pytest.mark.parametrize("eps", [0.25, 2.0**-12])
def test_both_sides_of_a_floor(route, dtype, name, eps):
    value, slope, under = FLOORS[name]
    kept = [eps, above(eps, dtype), 3.0]
    dropped = [below(eps, dtype), 2.0**-14, 0.0, -0.0]
    if name == "safe_reciprocal":
        dropped += [-below(eps, dtype)]
        kept += [-eps, below(-eps, dtype)]
    else:
        dropped += [-1.0, -eps]
    x = kept + dropped
    want = [value(v) for v in kept] + [under(v, eps) for v in dropped]
    options = {"fill_value": -3.0} if name == "safe_reciprocal" else {}
    check(
        route,
        name,
        [tensor(x, dtype)],
        [want, [slope(v) for v in kept] + [0.0] * len(dropped)],
        dtype,
        eps=eps,
        **options,
    )
    minus_zero = ROUTES[route](name)(tensor([-0.0], dtype), eps=eps, **options)
    assert name != "safe_sqrt" or not minus_zero.signbit().any()


@each_route
@each_dtype
@pytest.mark.parametrize("name", FLOORS)
def test_the_default_floor_is_the_smallest_normal_number_of_the_compute_dtype(route, dtype, name):
    value, slope, under = FLOORS[name]
    tiny = torch.finfo(compute(dtype)).tiny
    fill = {"fill_value": -3.0} if name == "safe_reciprocal" else {}
    if dtype == torch.float16:  # none of its numbers is below but 0
        kept, dropped = [2.0**-24], [0.0, -0.0]
    else:
        kept, dropped = [tiny, above(tiny, dtype)], [below(tiny, dtype), 0.0, -0.0]
        dropped.append(-below(tiny, dtype) if name == "safe_reciprocal" else -tiny)

    def slopes(x):
        try:
            return slope(x)
        except OverflowError:
            return -INF

    values = [value(v) for v in kept] + [under(v, tiny) for v in dropped]
    operands = [tensor(kept + dropped, dtype)]
    if dtype == torch.float16:
        got = call(route, name, operands, dtype=torch.float32, **fill)
        assert_equal(got[0], values, torch.float32)
        return assert_equal(got[1], [slope(kept[0]), 0.0, 0.0], dtype)
    check(route, name, operands, [values, [*map(slopes, kept), *[0.0] * len(dropped)]], dtype, **fill)


@each_route
@each_dtype
@pytest.mark.parametrize("name", FLOORS)
def test_a_floor_too_small_for_the_compute_dtype(route, dtype, name):
    """As if it were its smallest positive number: 0 has a stand-in, and it is finite."""
    eps = 1e-60 if dtype != torch.float64 else 5e-324
    value, grad = call(route, name, [tensor([0.0, -0.0, 1.0], dtype)], eps=eps)
    smallest = torch.finfo(compute(dtype)).tiny * torch.finfo(compute(dtype)).eps
    if name == "safe_log":
        assert_equal(value[:2], [math.log(smallest)] * 2, dtype)
    assert all(map(math.isfinite, value)) and grad[:2] == [0, 0] and abs(grad[2]) in (0.5, 1)
    if name in ("safe_sqrt", "safe_reciprocal"):
        value, grad = call(route, name, [tensor([0.0, -0.0, 1.0], dtype)], eps=0)
        assert value == [0, 0, 1] and grad[:2] == [0, 0]


@each_route
@each_dtype
@pytest.mark.parametrize("name", FLOORS)
def test_infinite_and_missing_operands_of_a_floor(route, dtype, name):
    top, minus = {"safe_log": (INF, math.log(0.25)), "safe_sqrt": (INF, 0.0), "safe_rsqrt": (0.0, 2.0),
                  "safe_reciprocal": (0.0, 0.0)}[name]  # fmt: skip
    value, grad = call(route, name, [tensor([INF, -INF, NAN], dtype)], eps=0.25)
    assert_equal(value, [top, minus, NAN], dtype)
    assert grad[:2] == [0, 0] and math.isnan(grad[2])


# Saturation ----------------------------------------------------------------------------------------------------------
@each_route
@each_dtype
def test_both_sides_of_where_exp_saturates(route, dtype):
    """In the compute dtype's numbers: the last one that rounds to a finite number of the output dtype, and the next."""
    wide, info = compute(dtype), torch.finfo(dtype)
    # Half a step above the largest number is where rounding turns to inf.
    edge = math.log(info.max) + (math.log1p(info.eps / 4) if dtype in HALVES else 0.0)
    x = tensor([edge * (1 - 2e-6), edge * (1 + 2e-6), 1000.0, INF, -INF, NAN, -1000.0, 0.0][2:], wide)
    value, grad = call(route, "safe_exp", [x], dtype=dtype)
    assert_equal(value, [info.max, INF, 0.0, NAN, 0.0, 1.0], dtype)
    assert grad[0] == 0 and grad[1] == INF and grad[2] == 0 and math.isnan(grad[3]) and grad[4:] == [0, 1]
    for factor, saturates in ((1 - 2e-6, False), (1 + 2e-6, True)):
        x = torch.full((9,), edge * factor, dtype=torch.float64).to(wide).to(DEVICE)
        (value,), (grad,) = call(route, "safe_exp", [x], dtype=dtype)
        assert (grad == 0) == saturates
        assert_equal([value], [info.max if saturates else math.exp(float(x[0]))], dtype, extra=64)
        if saturates:
            assert value == info.max


@each_route
@pytest.mark.parametrize("dtype", HALVES)
def test_both_sides_of_where_half_saturates(route, dtype):
    """Each function at the two fp32 numbers between which its value starts to round to inf."""
    largest = torch.finfo(dtype).max
    edge = largest * (1 + torch.finfo(dtype).eps / 4)  # half a step above; a tie rounds to inf
    inverse = {"safe_reciprocal": lambda y: 1 / y, "safe_sqrt": lambda y: y * y, "safe_rsqrt": lambda y: y**-2,
               "safe_exp": math.log}  # fmt: skip
    for name, back in inverse.items():
        at = back(edge)
        if not 1e-37 < abs(at) < 3e38:
            continue  # no fp32 number comes to it
        options = {"eps": 1e-38} if name in ("safe_reciprocal", "safe_sqrt", "safe_rsqrt") else {}
        rising = name in ("safe_sqrt", "safe_exp")
        inner, outer = (at * (1 - 1e-5), at * (1 + 1e-5)) if rising else (at * (1 + 1e-5), at * (1 - 1e-5))
        x = torch.tensor([inner, outer], dtype=torch.float32).repeat(9).to(DEVICE)
        value, grad = call(route, name, [x], dtype=dtype, **options)
        assert value == [largest, largest], name
        assert grad[0] != 0 and grad[1] == 0, (name, grad)
        for upstream in (NAN, INF):
            assert call(route, name, [x], upstream, dtype=dtype, **options)[1][1] == 0


@each_route
def test_stand_ins_that_do_not_fit_saturate(route):
    half, zero = torch.float16, tensor([0.0], torch.float16)
    assert call(route, "safe_rsqrt", [zero]) == [[65504.0], [0.0]]  # 9.2e18 in fp32
    assert call(route, "safe_reciprocal", [zero], fill_value=-1e9) == [[-65504.0], [0.0]]
    assert call(route, "safe_reciprocal", [zero], fill_value=-INF)[0] == [-INF]  # what was asked for
    assert call(route, "safe_sqrt", [tensor([2.0**100])], eps=1e38, dtype=half) == [[65504.0], [0.0]]
    assert call(route, "safe_reciprocal", [tensor([2.0**-10, -(2.0**-10)])], dtype=half)[0] == [1024.0, -1024.0]
    assert call(route, "safe_reciprocal", [tensor([2.0**-20, -(2.0**-20)])], dtype=half)[0] == [65504.0, -65504.0]


# Arcs ----------------------------------------------------------------------------------------------------------------
@each_route
@each_dtype
@pytest.mark.parametrize("name", ["safe_acos", "safe_asin"])
def test_both_sides_of_the_bounds_of_an_arc(route, dtype, name):
    function, sign = (math.acos, -1) if name == "safe_acos" else (math.asin, 1)
    inside = [below(1.0, dtype), -below(1.0, dtype), 0.5, -0.5, 0.0]
    outside = [1.0, -1.0, above(1.0, dtype), -above(1.0, dtype), 2.0, -2.0, INF, -INF]
    slopes = [sign / math.sqrt((1 - v) * (1 + v)) for v in inside] + [0.0] * len(outside)
    values = [function(v) for v in inside] + [function(max(-1.0, min(1.0, v))) for v in outside]
    check(route, name, [tensor(inside + outside, dtype)], [values, slopes], dtype)
    value, grad = call(route, name, [tensor([NAN], dtype)])
    assert math.isnan(value[0]) and math.isnan(grad[0])


# Powers --------------------------------------------------------------------------------------------------------------
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
        # a slope of 0 is no stand-in: what GradScaler looks for shows, except where the exponent is 0
        shown = [not none and y != 0 for none, y in zip(stand_in, b)]
        assert [not math.isfinite(g) for g in grads[0]] == shown
        assert [not math.isfinite(g) for g in grads[1]] == [not none and x > 0 for none, x in zip(stand_in, a)]


@each_route
@each_dtype
def test_powers_of_what_is_not_finite_are_those_of_torch(route, dtype):
    pool = [INF, -INF, NAN, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -3.0, 4.0]
    grid = torch.cartesian_prod(*[torch.tensor(pool, dtype=torch.float64)] * 2)
    a, b = grid[~grid.isfinite().all(1)].unbind(1)
    got = ROUTES[route]("safe_pow")(a.to(dtype).to(DEVICE), b.to(dtype).to(DEVICE)).double().cpu()
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
        assert ROUTES[route](name)(x, number, **options).dtype == dtype
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
    """x^-1/2 of a small number: its slope is beyond the dtype, and 0 times it must be 0."""
    wide = compute(dtype)
    small = 2.0**-100 if wide == torch.float32 else 2.0**-700
    operands = [tensor([small, small, -small], wide), tensor([-0.5, 0.5, -1.0], wide)]
    value, da, db = call(route, "safe_pow", operands, 0.0)
    assert_equal(value, [small**-0.5, small**0.5, -1 / small], wide)
    assert da == [0, 0, 0] and db == [0, 0, 0]
    # and a gradient small enough for the product to fit gets it
    value, da, db = call(route, "safe_pow", operands, small)
    assert_equal(da, [-0.5 * small**-0.5, 0.5 * small**0.5, -1 / small], wide, extra=8)


# Angles --------------------------------------------------------------------------------------------------------------
@each_route
@each_dtype
def test_angles_at_the_origin_and_around_it(route, dtype):
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # the numbers next to 0
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


# xlogy ---------------------------------------------------------------------------------------------------------------
@each_route
@each_dtype
def test_a_zero_masks_its_logarithm_out(route, dtype):
    zero = [0.0, -0.0] * 3
    other = [NAN, INF, -INF, 0.0, -0.0, -1.0]
    for upstream in (1.0, NAN, INF):
        value, dx, dy = call(route, "xlogy", [tensor(zero, dtype), tensor(other, dtype)], upstream)
        assert value == [0] * 6 and dx == [0] * 6 and dy == [0] * 6
    # pytorch#80770: where there is a logarithm, it is the gradient
    for upstream in (1.0, 0.0):
        value, dx, dy = call(route, "xlogy", [tensor([0.0, -0.0], dtype), tensor([0.5, 3.0], dtype)], upstream)
        assert value == [0, 0] and dy == [0, 0] and math.copysign(1, value[0]) == 1
        assert_equal(dx, [upstream * math.log(0.5), upstream * math.log(3)], dtype)
    _, dx, dy = call(route, "xlogy", [tensor([0.0], dtype), tensor([2.0], dtype)], NAN)
    assert math.isnan(dx[0]) and math.isnan(dy[0])
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # next to 0, and not masked
    value, _, dy = call(route, "xlogy", [tensor([smallest, -smallest], dtype), tensor([0.0, 0.0], dtype)])
    assert value == [-INF, INF] and dy == [INF, -INF]
    value, dx, _ = call(route, "xlogy", [tensor([1.0, 1.0, 2.0], dtype), tensor([NAN, -1.0, 1.0], dtype)])
    assert math.isnan(value[0]) and math.isnan(value[1]) and value[2] == 0 and dx[2] == 0


# Derivatives beyond the first ----------------------------------------------------------------------------------------
@each_route
@pytest.mark.parametrize("name", UNARY)
def test_second_derivatives_and_tangents_are_zero_over_a_stand_in(route, name):
    dropped = {"safe_exp": [1000.0, 710.0], "safe_acos": [1.0, -2.0], "safe_asin": [-1.0, 2.0]}.get(name, [0.0, -0.0])
    x = torch.tensor([*dropped, 0.5], dtype=torch.float64, device=DEVICE, requires_grad=True)
    op = ROUTES[route](name)
    (first,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first[:2].tolist() == [0, 0] and second[:2].tolist() == [0, 0]
    assert first[2] != 0 and (second[2] != 0)
    tangent = torch.func.jvp(op, (x.detach(),), (torch.tensor([NAN, INF, 1.0], dtype=torch.float64, device=DEVICE),))[1]
    assert tangent[:2].tolist() == [0, 0] and tangent[2] == first[2]


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
    op = ROUTES[route](name)
    first = torch.autograd.grad(op(a, b).sum(), (a, b), create_graph=True)
    assert all(not g.any() for g in first)
    weight = torch.rand_like(a)
    second = torch.autograd.grad(sum((g * weight).sum() for g in first), (a, b), allow_unused=True)
    assert all(g is None or not g.any() for g in second)
    nan = torch.full_like(a, NAN).detach()
    tangent = torch.func.jvp(op, (a.detach(), b.detach()), (nan, nan))[1]
    slope = (b == 1.5) if name == "safe_pow" else torch.zeros_like(a, dtype=torch.bool)  # 0^1.5 has one, of 0
    assert tangent[slope].isnan().all() and not tangent[~slope].any()


SMALL = {torch.float32: [1e-30, 1e-38, 1e-40], torch.float64: [1e-160, 1e-300]}


@each_route
@pytest.mark.parametrize("name", ["safe_log", "safe_sqrt", "safe_rsqrt", "safe_reciprocal", "safe_pow", "safe_atan2"])
@pytest.mark.parametrize("upstream, cotangent", [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_second_derivatives_of_small_numbers_times_zero_are_zero(route, name, upstream, cotangent):
    """They do not fit: 1 / x^2 of 1e-30 is 1e60."""
    op = ROUTES[route](name)
    for dtype, sizes in SMALL.items():
        if dtype == torch.float64 and upstream == 0:
            continue  # there is nothing wider to take the product in
        sizes = [x for x in sizes if name in ("safe_pow", "safe_atan2") or x >= torch.finfo(dtype).tiny]
        x = torch.tensor(sizes, dtype=dtype, device=DEVICE, requires_grad=True)
        rest = [torch.full_like(x, v).requires_grad_() for v in (0.5, 0.0, 1.5, 2.0)] if name == "safe_pow" else [None]
        rest = [x.detach().flip(0).requires_grad_()] if name == "safe_atan2" else rest
        for other in rest:
            leaves = [x] if other is None else [x, other]
            out = op(*leaves)
            first = torch.autograd.grad(out, leaves, torch.full_like(out, upstream), create_graph=True)
            second = torch.autograd.grad(first, leaves, [torch.full_like(g, cotangent) for g in first])
            assert all((g == 0).all() for g in second), (dtype, sizes, second)


@each_route
@pytest.mark.parametrize("name, first, second", [
    ("safe_log", lambda x: 1 / x, lambda x: -1 / x / x),
    ("safe_rsqrt", lambda x: -0.5 * x**-1.5, lambda x: 0.75 * x**-2.5),
])  # fmt: skip
def test_second_derivatives_of_any_size(route, name, first, second):
    sizes = [1e-12, 1e-3, 0.7, 1.0, 3.0, 1e6, 1e12]
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(sizes, dtype=dtype, device=DEVICE, requires_grad=True)
        (g,) = torch.autograd.grad(ROUTES[route](name)(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        rtol = 8 * TOLERANCES[dtype][0]
        for got, want in ((g.detach(), first), (h, second)):
            torch.testing.assert_close(got.cpu().double(), want(x.detach().cpu().double()), rtol=rtol, atol=0)


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


@each_route
def test_the_slope_of_xlogy_by_a_tiny_operand(route):
    """g a / b where g a vanishes, or is 0, and a / b overflows."""
    a, b = tensor([1e10, 1.0, 1e200, 1e10], torch.float64), tensor([1e-300, 5e-324, 1e-200, 1e-300], torch.float64)
    assert call(route, "xlogy", [a, b], 0.0)[2] == [0] * 4
    if route == "kernel":
        small = call(route, "xlogy", [a, b], 2.0**-1063)[2]
        assert small[0] == small[3] == pytest.approx(2.0**-1063 * 1e300 * 1e10, rel=1e-15)

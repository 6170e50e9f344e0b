"""The unary functions where they have no value: below a floor, beyond the largest number, at the bounds of an arc."""

import math

import pytest
import torch

from safeops.ops.elementwise._unary import Unary
from safeops.testing.compare import TOLERANCES
from tests.contract.common import DEVICE, each_route, names, on
from tests.contract.elementwise.stand_ins import (
    HALVES,
    above,
    assert_equal,
    below,
    call,
    check,
    compute,
    each_dtype,
    tensor,
)

INF, NAN = math.inf, math.nan


# ---- a floor: log, sqrt, rsqrt, reciprocal


FLOORS = {  # (value above the floor, slope above it, value below it)
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
    minus_zero = on(route, name)(tensor([-0.0], dtype), eps=eps, **options)
    assert name != "safe_sqrt" or not minus_zero.signbit().any()


@each_route
@each_dtype
@pytest.mark.parametrize("name", FLOORS)
def test_the_default_floor_is_the_smallest_normal_number_of_the_compute_dtype(route, dtype, name):
    value, slope, under = FLOORS[name]
    tiny = torch.finfo(compute(dtype)).tiny
    fill = {"fill_value": -3.0} if name == "safe_reciprocal" else {}
    if dtype == torch.float16:  # (0 is its only number below the floor)
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
    """A floor that rounds to 0 becomes the smallest positive number: the stand-in at 0 is finite."""
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


# ---- saturation


@each_route
@each_dtype
def test_both_sides_of_where_exp_saturates(route, dtype):
    """exp saturates from x = edge on, where e^x rounds to inf in the output dtype, and not just below edge."""
    wide, info = compute(dtype), torch.finfo(dtype)
    # A value rounds to inf from half a step above the output dtype's largest number on.
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
    """Each function must saturate exactly where its value, rounded to half, would be inf: not before, and not after."""
    largest = torch.finfo(dtype).max
    edge = largest * (1 + torch.finfo(dtype).eps / 4)  # half a step above: the first value that rounds to inf
    inverse = {"safe_reciprocal": lambda y: 1 / y, "safe_sqrt": lambda y: y * y, "safe_rsqrt": lambda y: y**-2,
               "safe_exp": math.log}  # fmt: skip
    for name, back in inverse.items():
        at = back(edge)
        if not 1e-37 < abs(at) < 3e38:
            continue  # no fp32 number has that value
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
    assert call(route, "safe_rsqrt", [zero]) == [[65504.0], [0.0]]  # saturated: in fp32 it is 9.2e18
    assert call(route, "safe_reciprocal", [zero], fill_value=-1e9) == [[-65504.0], [0.0]]
    assert call(route, "safe_reciprocal", [zero], fill_value=-INF)[0] == [-INF]  # an infinity as fill value is kept
    assert call(route, "safe_sqrt", [tensor([2.0**100])], eps=1e38, dtype=half) == [[65504.0], [0.0]]
    assert call(route, "safe_reciprocal", [tensor([2.0**-10, -(2.0**-10)])], dtype=half)[0] == [1024.0, -1024.0]
    assert call(route, "safe_reciprocal", [tensor([2.0**-20, -(2.0**-20)])], dtype=half)[0] == [65504.0, -65504.0]


# ---- arcs


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


# ---- derivatives beyond the first


@each_route
@pytest.mark.parametrize("name", names(Unary))
def test_second_derivatives_and_tangents_are_zero_over_a_stand_in(route, name):
    dropped = {"safe_exp": [1000.0, 710.0], "safe_acos": [1.0, -2.0], "safe_asin": [-1.0, 2.0]} | {
        "safe_acosh": [1.0, -2.0],
        "log1mexp": [0.0, 2.0],
    }
    kept = {"safe_acosh": 1.5, "log1mexp": -0.5}.get(name, 0.5)
    x = torch.tensor([*dropped.get(name, [0.0, -0.0]), kept], dtype=torch.float64, device=DEVICE, requires_grad=True)
    op = on(route, name)
    (first,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first[:2].tolist() == [0, 0] and second[:2].tolist() == [0, 0]
    assert first[2] != 0 and (second[2] != 0)
    tangent = torch.func.jvp(op, (x.detach(),), (torch.tensor([NAN, INF, 1.0], dtype=torch.float64, device=DEVICE),))[1]
    assert tangent[:2].tolist() == [0, 0] and tangent[2].item() == pytest.approx(first[2].item())


@each_route
@pytest.mark.parametrize("name, first, second", [
    ("safe_log", lambda x: 1 / x, lambda x: -1 / x / x),
    ("safe_rsqrt", lambda x: -0.5 * x**-1.5, lambda x: 0.75 * x**-2.5),
])  # fmt: skip
def test_second_derivatives_of_any_size(route, name, first, second):
    sizes = [1e-12, 1e-3, 0.7, 1.0, 3.0, 1e6, 1e12]
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(sizes, dtype=dtype, device=DEVICE, requires_grad=True)
        (g,) = torch.autograd.grad(on(route, name)(x).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), x)
        rtol = 8 * TOLERANCES[dtype][0]
        for got, want in ((g.detach(), first), (h, second)):
            torch.testing.assert_close(got.cpu().double(), want(x.detach().cpu().double()), rtol=rtol, atol=0)

"""The functions of one and two operands on random shapes, strides, dtypes and values from an adversarial pool."""

import functools
import math
import warnings

import pytest
import torch

import safeops
from safeops.core.dtypes import compute_dtype
from safeops.ops.elementwise._binary import Binary
from safeops.ops.elementwise._unary import Unary
from safeops.testing import DTYPES, Sample, Subject, run
from safeops.testing.compare import COMPUTE_EPS, TOLERANCES, assert_nonfinite_alike, assert_right
from tests.contract.common import DEVICE, each_route, names, on
from tests.contract.properties import BOUNDED, given, operands, st
from tests.ops import RECORDS, definitions

INF, NAN = math.inf, math.nan
FINFO = [torch.finfo(d) for d in DTYPES]
# Zeros, the range's ends and subnormals of each dtype, where half rounds to inf, and -1 and 1 (the bounds of acos) with
# their neighbors.
POOL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -3.0, 0.1, 12.0, 88.5, 709.0, 65504.0, 65520.0]
POOL += [1 - 2.0**-11, 1 - 2.0**-24, 1 + 2.0**-10, 1 - 2.0**-53]
POOL += [sign * x for f in FINFO for x in (f.max, f.tiny, f.tiny / 2, f.tiny * f.eps) for sign in (1, -1)]
NONFINITE = [NAN, INF, -INF]
# xlogy's gradient is (g x) / y, as torch's: only numbers for which g x neither overflows nor vanishes.
POOLS = {"xlogy": [x for x in POOL if x == 0 or 1e-10 < abs(x) < 1e10]}
# Factors on the tolerances. SUBNORMAL, on atol: a gradient or an intermediate number may be subnormal and lose digits.
# SLOPES, on the arithmetic's share of rtol: a^(b - 1) magnifies the rounding of b - 1 by |log a|, up to 709.
SUBNORMAL, SLOPES = {"safe_atan2": 2**12, "safe_pow": 2**12}, {"safe_pow": 1 + 709 / 64}


def judge(route, name, sample, safe):
    """Asserts that values, and gradients of operands that are not broadcast, equal the fp64 definition's. safe: finite
    operands must give finite values and no NaN gradient."""
    op = on(route, name)
    subject = Subject(
        op, getattr(definitions, name), (sample,), dtype_rule="safe" if safe else "elementwise", device=DEVICE
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(op, sample)
    truth = subject.truth(sample, got.upstream)
    assert got.values[0].dtype == subject.out_dtype(sample)
    assert_right(sample, [("value", got.values[0])], truth)
    if safe and name != "magnitude" and all(t.isfinite().all() for t in sample.floats().values()):
        assert got.values[0].isfinite().all()
        assert not any(g.isnan().any() for k, g in got.grads.items() if sample.get(k).shape == got.values[0].shape)
    for key, grad in got.grads.items():
        if sample.get(key).shape == got.values[0].shape:
            assert_gradient(name, f"gradient of operand {key!r}", grad, truth.grads[key], sample, got.upstream[0])


def assert_gradient(name, what, got, truth, sample, upstream):
    rounded = truth.to(got.dtype)
    rtol, atol = TOLERANCES[got.dtype]
    edge = (truth.abs() / torch.finfo(got.dtype).max - 1).abs() <= 64 * rtol
    if name == "safe_pow":  # with an infinite base or exponent the formula may give inf or NaN as slope
        infinite = functools.reduce(torch.logical_or, (x.isinf() for x in sample.floats().values()))
        got = torch.where(infinite, rounded, got)
    assert_nonfinite_alike(what, torch.where(edge, rounded, got), rounded)
    due = rounded.isfinite() & got.isfinite()
    error = torch.where(due, (got.double() - truth).abs(), 0)
    slack = rtol + (SLOPES.get(name, 1) - 1) * COMPUTE_EPS[got.dtype]
    wrong = error > slack * torch.where(due, truth.abs(), 0) + atol * SUBNORMAL.get(name, 1)
    if len(sample.floats()) == 2:  # not judged: subnormal operands, whose products lose digits
        for x in sample.floats().values():
            wrong &= (x == 0) | ~(x.double().abs() < torch.finfo(compute_dtype(x.dtype)).tiny)
    if wrong.any():
        shown = [t.expand(got.shape)[wrong][:3].tolist() for t in (*sample.floats().values(), upstream)]
        raise AssertionError(
            f"{what}: got {got[wrong][:3].tolist()}, want {truth[wrong][:3].tolist()} ({got.dtype}) of {shown}"
        )


@each_route
@pytest.mark.parametrize("name", names(Unary))
@BOUNDED
@given(st.data())
def test_unary(route, name, data):
    _, numbers, _ = data.draw(operands())
    x = numbers(pool=POOL + (NONFINITE if data.draw(st.booleans()) else []))
    options = {}
    if "dtype" in RECORDS[name].call:
        options["dtype"] = data.draw(st.sampled_from([None, *DTYPES]))
    if "eps" in RECORDS[name].call:
        options["eps"] = data.draw(st.sampled_from([None, 2.0**-24, 0.5]))
        if x.dtype == torch.float64 and options["dtype"] is not None:
            options["eps"] = 2.0**-100  # the fp64 definition would not round eps to the result's dtype
    if "fill_value" in RECORDS[name].call:
        options["fill_value"] = data.draw(st.sampled_from([0.0, -3.0, 1e9]))
    judge(route, name, Sample((x,), options), safe=True)


@each_route
@pytest.mark.parametrize("name", [n for n in names(Binary) if n != "safe_div"])
@BOUNDED
@given(st.data())
def test_binary(route, name, data):
    _, numbers, _ = data.draw(operands())
    pool = POOLS.get(name, POOL) + (NONFINITE if data.draw(st.booleans()) else [])
    full = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    sample = Sample(tuple(numbers(full=f, pool=pool) for f in full))
    judge(route, name, sample, safe=name != "xlogy")


@BOUNDED
@given(st.data())
def test_safe_div(data):
    shape, numbers, _ = data.draw(operands())
    a = numbers(full=data.draw(st.booleans()))
    b = numbers(full=True)
    kwargs = {
        "eps": data.draw(st.sampled_from([None, 0.0, 1e-8, 0.5])),
        "fill_value": data.draw(st.sampled_from([0.0, -3.0, 1e9])),
    }
    sample = Sample((a, b), kwargs)
    # No divisor of POOL may lie between eps and eps rounded to fp32, where kernel and definition would disagree.
    with_gradient = run(safeops.safe_div, sample)
    subject = Subject(safeops.safe_div, definitions.safe_div, (sample,), dtype_rule="safe", device=DEVICE)
    truth = subject.truth(sample, with_gradient.upstream)
    assert_right(sample, [("value", with_gradient.values[0])], truth)
    if a.isfinite().all() and b.isfinite().all():
        assert with_gradient.values[0].isfinite().all()
    for key, grad in with_gradient.grads.items():
        if sample.get(key).shape == truth.values[0].shape:
            assert_nonfinite_alike(f"gradient of operand {key}", grad, truth.grads[key].to(grad.dtype))

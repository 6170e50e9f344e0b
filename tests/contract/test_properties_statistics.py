"""Random shapes, strides, dims, dtypes, masks and weights for the statistics, against the definitions in float64."""

import math

import pytest
import torch

import safeops
from safeops.testing import Sample, run
from safeops.testing.compare import assert_same_bits
from tests.contract import definitions_statistics as definitions
from tests.contract.bad_calls_statistics import STATISTICS
from tests.contract.subjects import composite
from tests.contract.subjects_statistics import exponential_terms, spread_terms
from tests.contract.test_properties import BOUNDED, POOL, given, operands, right, st

TERMS = {"masked_var": spread_terms, "masked_std": spread_terms, "masked_logsumexp": exponential_terms}
ROUTES = {"kernel": lambda op, name: op, "composite": composite}
each_route = pytest.mark.parametrize("route", ROUTES)
# Exponentials and deviations of one size: beside 1e4 the digits of 1e-7 are nobody's.
MODERATE = [0.5, -0.5, 1.0, -1.0, 0.1, 3.0, -7.5, 12.0]


def options(data, shape, numbers, mask):
    kwargs = {"keepdim": data.draw(st.booleans())}
    if shape:
        dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, max_size=len(shape)))
        signed = tuple(d - len(shape) if data.draw(st.booleans()) else d for d in dims)
        kwargs["dim"] = data.draw(st.sampled_from([None, signed, signed[0]])) if signed else None
    if data.draw(st.booleans()):
        kwargs["mask"] = mask()
    if data.draw(st.booleans()):
        kwargs["weight"] = numbers(full=False, pool=[0.0, 0.5, 1.0, 2.0, 7.0])
    return kwargs


@each_route
@pytest.mark.parametrize("name", STATISTICS)
@BOUNDED
@given(st.data())
def test_statistics(name, route, data):
    shape, numbers, mask = data.draw(operands())
    kwargs = options(data, shape, numbers, mask) | {"empty": data.draw(st.sampled_from(["zero", "nan"]))}
    pool = POOL
    if name in ("masked_var", "masked_std", "masked_logsumexp"):
        pool = MODERATE
    if name in ("masked_var", "masked_std"):
        # weights of 0, 1/2, 1, ...: their sum is exact, and so is whether it exceeds a correction
        kwargs["correction"] = data.draw(st.sampled_from([0, 1, 0.75, 2]))
    if name == "masked_norm":
        kwargs["ord"] = data.draw(st.sampled_from([1, 2, math.inf, -math.inf]))
    sample = Sample((numbers(pool=pool),), kwargs, differentiable=(0,))
    op = ROUTES[route](getattr(safeops, name), name)
    right(op, getattr(definitions, name), sample, data=(0,), terms=TERMS.get(name))
    keep = kwargs.get("mask")
    if keep is not None and 0 < keep.sum() < keep.numel():
        clean = run(op, sample.poisoned(1.0))
        dirty = run(op, sample.poisoned(float("nan")), clean.upstream)
        for (what, a), (_, b) in zip(dirty, clean):
            assert_same_bits(what, a.contiguous(), b.contiguous(), "changed by NaN under the mask")


@each_route
@BOUNDED
@given(st.data())
def test_count(route, data):
    shape, numbers, mask = data.draw(operands())
    kwargs = options(data, shape, numbers, mask)
    x = numbers()
    got = ROUTES[route](safeops.masked_count, "masked_count")(x, **kwargs)
    want = definitions.masked_count(x.double(), **kwargs)
    assert got.dtype == torch.int64 and got.shape == want.shape and torch.equal(got, want)

"""Random shapes, strides, dims, dtypes, masks and values from an adversarial pool for the functions of rows."""

import warnings

import pytest
import torch

import safeops
from safeops.testing import Sample, run
from safeops.testing.compare import assert_same_bits
from tests.contract import definitions_rows as definitions
from tests.contract.subjects import composite
from tests.contract.subjects_rows import cosine_terms, log_softmax_terms, normalize_terms, softmax_terms
from tests.contract.test_properties import BOUNDED, given, operands, right, st

ROUTES = {"kernel": lambda op, name: op, "composite": composite}
each_route = pytest.mark.parametrize("route", ROUTES)
# One number from which nothing overflows in half, and no zero: what a vanishing norm does is in test_cases_rows.
LENGTHS = [1.0, -1.0, 0.1, 3.0, -7.5, 240.0, -300.0]


def along(data, shape):
    """A dim of the shape, counted from either end."""
    rank = max(len(shape), 1)
    return data.draw(st.integers(-rank, rank - 1))


@each_route
@pytest.mark.parametrize("name, terms", [("masked_softmax", softmax_terms), ("masked_log_softmax", log_softmax_terms)])
@BOUNDED
@given(st.data())
def test_softmax(name, terms, route, data):
    shape, numbers, mask = data.draw(operands())
    op = ROUTES[route](getattr(safeops, name), name)
    x, keep = numbers(), mask() if data.draw(st.booleans()) else None
    sample = Sample((x, keep), {"dim": along(data, shape)}, mask=1)
    right(op, getattr(definitions, name), sample, dtype_rule="input", row_terms=terms)
    if keep is not None and 0 < keep.sum() < keep.numel():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clean = run(op, sample.poisoned(1.0))
            dirty = run(op, sample.poisoned(float("nan")), clean.upstream)
        for (what, a), (_, b) in zip(dirty, clean):
            assert_same_bits(what, a.contiguous(), b.contiguous(), "changed by NaN under the mask")


@each_route
@BOUNDED
@given(st.data())
def test_normalize(route, data):
    shape, numbers, _ = data.draw(operands())
    kwargs = {"dim": along(data, shape), "eps": data.draw(st.sampled_from([None, 2.0**-40, 2.0]))}
    op = ROUTES[route](safeops.normalize, "normalize")
    sample = Sample(
        (numbers(pool=data.draw(st.sampled_from([LENGTHS, [*LENGTHS, float("nan"), float("inf")]]))),), kwargs
    )
    right(op, definitions.normalize, sample, dtype_rule="input", row_terms=normalize_terms)


@each_route
@BOUNDED
@given(st.data())
def test_cosine_similarity(route, data):
    shape, numbers, _ = data.draw(operands())
    full = data.draw(st.booleans())
    x1, x2 = numbers(full=full, pool=LENGTHS), numbers(full=not full or data.draw(st.booleans()), pool=LENGTHS)
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    kwargs = {"dim": along(data, shape), "eps": data.draw(st.sampled_from([None, 2.0**-40, 2.0]))}
    op = ROUTES[route](safeops.cosine_similarity, "cosine_similarity")
    got = right(op, definitions.cosine_similarity, Sample((x1, x2), kwargs), row_terms=cosine_terms)
    finite = got.values[0][got.values[0].isfinite()]
    assert not finite.numel() or finite.abs().max() <= 1

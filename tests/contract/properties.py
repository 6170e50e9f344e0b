"""Random shapes, strides, dtypes, masks and values from an adversarial pool: what the property tests draw."""

import importlib
import os
import warnings

import pytest
import torch

from safeops.testing import DTYPES, Subject, run
from safeops.testing.compare import assert_right
from safeops.testing.layouts import LAYOUTS
from tests.contract.common import DEVICE

# hypothesis is installed in CI, but a machine with a GPU may have pytest alone.
hypothesis = pytest.importorskip("hypothesis")


given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies


# hypothesis would also draw constants from the modules loaded so far, which differ between two workers.
providers = importlib.import_module("hypothesis.internal.conjecture.providers")
providers._get_local_constants = providers.Constants


# The number of examples is bounded, not the time: the same examples run on every machine.
BOUNDED = settings(
    max_examples=int(os.environ.get("SAFEOPS_TEST_EXAMPLES", "150")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)


# Sizes around vector widths and blocks, and 0.
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 65])


SHAPES = st.lists(SIZES, min_size=0, max_size=4).filter(lambda s: torch.Size(s).numel() <= 20_000).map(tuple)


# Adversarial values, exact in every dtype or rounded by the cast: the truth is computed after the cast.
POOL = [0.0, -0.0, 1.0, -1.0, 0.1, 3.0, -7.5, 1e-3, 1e-7, -6e-8, 240.0, -300.0, 1e4, -6e4]


@st.composite
def operands(draw, shapes=SHAPES, count=2):
    """Returns (shape, numbers, mask): two functions that draw tensors which broadcast to the shape, in any layout."""
    shape = draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    layouts = st.sampled_from([None, *LAYOUTS.values()])

    def narrowed():
        """Returns the shape, or a shape that broadcasts to it."""
        kept = draw(st.integers(0, len(shape))) if draw(st.booleans()) else 0
        return tuple(1 if draw(st.integers(0, 4)) == 0 else s for s in shape[kept:])

    def laid(t):
        layout = draw(layouts)
        other = layout(t) if layout is not None and t.numel() else None
        return t if other is None else other

    unusual = draw(st.integers(0, 3)) == 0

    def numbers(full=True, pool=POOL):
        size = shape if full else narrowed()
        pool = [*pool, float("nan"), float("inf"), -float("inf")] if unusual and pool is POOL else pool
        index = torch.randint(len(pool), size, generator=generator)
        noise = torch.rand(size, generator=generator, dtype=torch.float64)
        values = torch.tensor(pool, dtype=torch.float64)[index]
        values = torch.where(noise < 0.5, values * noise.clamp(min=0.01), values)
        return laid(values.to(draw(st.sampled_from(DTYPES))).to(DEVICE))

    def mask():
        keep = draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
        size = narrowed()
        return laid((torch.rand(size, generator=generator) < keep).to(DEVICE))

    return shape, numbers, mask


def right(op, reference, sample, **describe):
    """Checks values and gradients of one call; the upstream gradient may have any layout."""
    subject = Subject(op, reference, (sample,), device=DEVICE, **describe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(op, sample)
    truth = subject.truth(sample, got.upstream or None)
    assert all(v.dtype == subject.out_dtype(sample) for v in got.values)
    assert_right(sample, got, truth)
    return got

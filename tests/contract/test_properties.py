"""Random shapes, strides, dtypes, masks and values from an adversarial pool, against the definitions in float64."""

import os
import warnings

import pytest
import torch

import safeops
from safeops.testing import DTYPES, Sample, Subject, run
from safeops.testing.compare import assert_nonfinite_alike, assert_right, assert_same_bits
from safeops.testing.layouts import LAYOUTS
from tests.contract import definitions
from tests.contract.subjects import DEVICE

# CI has it; a machine borrowed for its GPU may have pytest alone.
hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

# Bounded by count, not by time: the same examples on every machine.
BOUNDED = settings(
    max_examples=int(os.environ.get("SAFEOPS_TEST_EXAMPLES", "150")),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
# Sizes around vector widths and blocks, and none.
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 65])
SHAPES = st.lists(SIZES, min_size=0, max_size=4).filter(lambda s: torch.Size(s).numel() <= 20_000).map(tuple)
# What hurts, each exact in every dtype or rounded by the cast: the truth is taken after the cast.
POOL = [0.0, -0.0, 1.0, -1.0, 0.1, 3.0, -7.5, 1e-3, 1e-7, -6e-8, 240.0, -300.0, 1e4, -6e4]
LOSSES = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]


@st.composite
def operands(draw, shapes=SHAPES, count=2):
    """(shape, make): make(dtype) gives a tensor that broadcasts to the shape, in a layout drawn at random."""
    shape = draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    layouts = st.sampled_from([None, *LAYOUTS.values()])

    def narrowed():
        """The shape, or one that broadcasts to it."""
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
    """Values and gradients of one call, for any layout of the upstream gradient that comes out of it."""
    subject = Subject(op, reference, (sample,), device=DEVICE, **describe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = run(op, sample)
    truth = subject.truth(sample, got.upstream or None)
    assert all(v.dtype == subject.out_dtype(sample) for v in got.values)
    assert_right(sample, got, truth)
    return got


@pytest.mark.parametrize("name", LOSSES)
@BOUNDED
@given(st.data())
def test_losses(name, data):
    shape, numbers, mask = data.draw(operands())
    full_x = data.draw(st.booleans())
    x, y = numbers(full=full_x), numbers(full=not full_x or data.draw(st.booleans()))
    kwargs = {"reduction": data.draw(st.sampled_from(["mean", "sum", "none"]))}
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if data.draw(st.booleans()):
        kwargs["mask"] = mask()
    if data.draw(st.booleans()):
        kwargs["weight"] = numbers(full=False, pool=[0.0, 0.5, 1.0, 2.0, 7.0])
    for key in ("mask", "weight"):  # they may not enlarge the loss
        if key in kwargs and torch.broadcast_shapes(shape, kwargs[key].shape) != shape:
            del kwargs[key]
    if name == "smooth_l1_loss":
        kwargs["beta"] = data.draw(st.sampled_from([0.0, 0.5, 1.0, 100.0]))
    if name == "huber_loss":
        kwargs["delta"] = data.draw(st.sampled_from([0.25, 1.0, 100.0]))
    sample = Sample((x, y), kwargs, differentiable=(0, 1))
    right(getattr(safeops, name), getattr(definitions, name), sample, data=(0, 1))
    if "mask" in kwargs and 0 < kwargs["mask"].sum() < kwargs["mask"].numel():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clean = run(getattr(safeops, name), sample.poisoned(1.0))
            dirty = run(getattr(safeops, name), sample.poisoned(float("nan")), clean.upstream)
        for (what, a), (_, b) in zip(dirty, clean):
            assert_same_bits(what, a.contiguous(), b.contiguous(), "changed by NaN under the mask")


@pytest.mark.parametrize("name", ["masked_sum", "masked_mean"])
@BOUNDED
@given(st.data())
def test_reductions(name, data):
    shape, numbers, mask = data.draw(operands())
    kwargs = {"keepdim": data.draw(st.booleans()), "empty": data.draw(st.sampled_from(["zero", "nan"]))}
    if shape:
        dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, max_size=len(shape)))
        signed = tuple(d - len(shape) if data.draw(st.booleans()) else d for d in dims)
        kwargs["dim"] = data.draw(st.sampled_from([None, signed, signed[0]])) if signed else None
    if data.draw(st.booleans()):
        kwargs["mask"] = mask()
    if data.draw(st.booleans()):
        kwargs["weight"] = numbers(full=False, pool=[0.0, 0.5, 1.0, 2.0, 7.0])
    sample = Sample((numbers(),), kwargs, differentiable=(0,))
    right(getattr(safeops, name), getattr(definitions, name), sample, data=(0,))


@BOUNDED
@given(st.data())
def test_masked_fill(data):
    shape, numbers, mask = data.draw(operands())
    value = data.draw(st.sampled_from([0.0, -1e9, 7.0, float("inf"), -float("inf")]))
    sample = Sample((numbers(full=data.draw(st.booleans())), mask(), value), mask=1, mask_keeps=False, masked=(0,))
    got = right(safeops.masked_fill, definitions.masked_fill, sample, dtype_rule="input")
    x, fill = sample.args[0], sample.args[1]
    kept = ~fill.expand(got.values[0].shape)
    assert_same_bits("kept elements", got.values[0][kept], x.expand(kept.shape)[kept], "changed")


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
    # In the compute dtype eps is rounded: a divisor may not lie between eps and its rounding.
    with_gradient = run(safeops.safe_div, sample)
    subject = Subject(safeops.safe_div, definitions.safe_div, (sample,), dtype_rule="safe", device=DEVICE)
    truth = subject.truth(sample, with_gradient.upstream)
    assert_right(sample, [("value", with_gradient.values[0])], truth)
    if a.isfinite().all() and b.isfinite().all():
        assert with_gradient.values[0].isfinite().all()
    for key, grad in with_gradient.grads.items():
        if sample.get(key).shape == truth.values[0].shape:
            assert_nonfinite_alike(f"gradient of operand {key}", grad, truth.grads[key].to(grad.dtype))

"""Losses, reductions, functions of rows and masked_fill on random operands, against the definitions in float64."""

import math
import warnings

import pytest
import torch

import safeops
from safeops.core.op import registry
from safeops.ops.losses._pointwise import PointwiseLoss
from safeops.testing import Sample, run
from safeops.testing.compare import assert_same_bits
from tests.contract.common import ALONG_A_DIM, REDUCTIONS, each_route, names, on
from tests.contract.properties import BOUNDED, POOL, given, operands, right, st
from tests.ops import RECORDS, definitions
from tests.ops.reductions.moments import exponential_terms

NUMBERS = [0.0, 0.25, 1.0, 100.0]  # values of a loss's parameters, if in range
# margin: 0 or no difference of two values of POOL: at the kink, rounding would choose the side. gamma: without 100,
# whose powers underflow to 0.
OWN_NUMBERS = {"margin": [0.0, 0.7], "gamma": [0.0, 0.25, 1.0, 2.0]}
# Losses that may be inf in fp32 where the fp64 definition is finite.
EXPONENTIAL = ("gaussian_kl_div", "poisson_nll_loss", "sigmoid_focal_loss")


def terms(name, kind):
    """Returns the function that sizes an op's terms, which may cancel: the record's, or masked_logsumexp's own."""
    return exponential_terms if name == "masked_logsumexp" else RECORDS[name].fields.get(kind)


@pytest.mark.parametrize("name", names(PointwiseLoss))
@BOUNDED
@given(st.data())
def test_losses(name, data):
    shape, numbers, mask = data.draw(operands())
    op, record, full_x = registry[name], RECORDS[name], data.draw(st.booleans())
    pool = MODERATE if name in EXPONENTIAL else POOL
    tensors = [numbers(full=full_x, pool=pool), numbers(full=not full_x or data.draw(st.booleans()), pool=pool)]
    tensors += [numbers(full=False) for _ in range(op.count - 2)]
    tensors = [to(x) for to, x in zip(record.domain, tensors)]
    kwargs = {"reduction": data.draw(st.sampled_from(["mean", "sum", "none"]))}
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    keys = tuple(range(op.count))
    if op.optional:
        keys, kwargs[op.names[-1]] = (*keys[:-1], op.names[-1]), tensors.pop()
    if data.draw(st.booleans()):
        kwargs["mask"] = mask()
    if data.draw(st.booleans()):
        kwargs["weight"] = numbers(full=False, pool=[0.0, 0.5, 1.0, 2.0, 7.0])
    for key in ("mask", "weight"):  # a mask or weight that enlarges the loss is an error
        if key in kwargs and torch.broadcast_shapes(shape, kwargs[key].shape) != shape:
            del kwargs[key]
    for parameter in op.parameters:
        least, most = parameter.range()
        values = [x for x in OWN_NUMBERS.get(parameter.name, NUMBERS) if least <= x <= most]
        values = [False, True] if parameter.kind is bool else values
        kwargs[parameter.name] = data.draw(st.sampled_from(values))
    sample = Sample(tuple(tensors), kwargs, differentiable=keys)
    right(getattr(safeops, name), getattr(definitions, name), sample, data=keys, terms=terms(name, "terms"),
          several_terms=record.fields.get("several_terms", False))  # fmt: skip
    if "mask" in kwargs and 0 < kwargs["mask"].sum() < kwargs["mask"].numel():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            clean = run(getattr(safeops, name), sample.poisoned(1.0))
            dirty = run(getattr(safeops, name), sample.poisoned(float("nan")), clean.upstream)
        for (what, a), (_, b) in zip(dirty, clean):
            assert_same_bits(what, a.contiguous(), b.contiguous(), "changed by NaN under the mask")


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


# Values of similar size, for exponentials and variances, where 1e4 would hide the digits of 1e-7.
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
@pytest.mark.parametrize("name", REDUCTIONS)
@BOUNDED
@given(st.data())
def test_reductions(name, route, data):
    shape, numbers, mask = data.draw(operands())
    kwargs = options(data, shape, numbers, mask) | {"empty": data.draw(st.sampled_from(["zero", "nan"]))}
    pool = POOL
    if name in ("masked_var", "masked_std", "masked_logsumexp"):
        pool = MODERATE
    if name in ("masked_var", "masked_std"):
        # Weights are multiples of 1/2, so that their sum is exact: rounding cannot decide if it exceeds the correction.
        kwargs["correction"] = data.draw(st.sampled_from([0, 1, 0.75, 2]))
    if name == "masked_norm":
        kwargs["ord"] = data.draw(st.sampled_from([1, 2, math.inf, -math.inf]))
    sample = Sample((numbers(pool=pool),), kwargs, differentiable=(0,))
    op = on(route, name)
    right(op, getattr(definitions, name), sample, data=(0,), terms=terms(name, "terms"))
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
    got = on(route, "masked_count")(x, **kwargs)
    want = definitions.masked_count(x.double(), **kwargs)
    assert got.dtype == torch.int64 and got.shape == want.shape and torch.equal(got, want)


# Numbers of vectors: none is 0 and no norm overflows half. (test_rows has the norms that are 0.)
LENGTHS = [1.0, -1.0, 0.1, 3.0, -7.5, 240.0, -300.0]


def along(data, shape):
    """Draws a dim of the shape, positive or negative."""
    rank = max(len(shape), 1)
    return data.draw(st.integers(-rank, rank - 1))


@each_route
@pytest.mark.parametrize("name", [name for name in ALONG_A_DIM if "mask" in RECORDS[name].call])
@BOUNDED
@given(st.data())
def test_softmax(name, route, data):
    shape, numbers, mask = data.draw(operands())
    op = on(route, name)
    x, keep = numbers(), mask() if data.draw(st.booleans()) else None
    sample = Sample((x, keep), {"dim": along(data, shape)}, mask=1)
    right(op, getattr(definitions, name), sample, dtype_rule="input", row_terms=terms(name, "row_terms"))
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
    op = on(route, "normalize")
    sample = Sample(
        (numbers(pool=data.draw(st.sampled_from([LENGTHS, [*LENGTHS, float("nan"), float("inf")]]))),), kwargs
    )
    right(op, definitions.normalize, sample, dtype_rule="input", row_terms=terms("normalize", "row_terms"))


@each_route
@BOUNDED
@given(st.data())
def test_cosine_similarity(route, data):
    shape, numbers, _ = data.draw(operands())
    full = data.draw(st.booleans())
    x1, x2 = numbers(full=full, pool=LENGTHS), numbers(full=not full or data.draw(st.booleans()), pool=LENGTHS)
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    kwargs = {"dim": along(data, shape), "eps": data.draw(st.sampled_from([None, 2.0**-40, 2.0]))}
    op = on(route, "cosine_similarity")
    got = right(
        op, definitions.cosine_similarity, Sample((x1, x2), kwargs), row_terms=terms("cosine_similarity", "row_terms")
    )
    finite = got.values[0][got.values[0].isfinite()]
    assert not finite.numel() or finite.abs().max() <= 1

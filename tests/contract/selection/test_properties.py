"""Random shapes, strides, dtypes, masks and indices for the selection ops, against their definitions.

Values are moved, not computed: they must be bit for bit the definition's in the same dtype. Gradients are compared in
float64, and must not change if the upstream gradient of a stand-in turns NaN.
"""

import math

import torch

from safeops.ops.selection._selection import MOVABLE
from safeops.testing import DTYPES, Sample, Subject, run
from safeops.testing.compare import assert_right, assert_same_bits
from safeops.testing.layouts import LAYOUTS
from safeops.testing.subject import make_upstream, outputs
from tests.contract.common import DEVICE, each_route, on
from tests.contract.properties import BOUNDED, POOL, SHAPES, given, st
from tests.ops import definitions

HURTS = torch.tensor([*POOL, math.nan, math.inf, -math.inf], dtype=torch.float64)
FILLS = [0, 0, -1, 7, 1e9, -1e30, math.inf]
# torch can neither index nor assign unsigned dtypes: the definition gets their bits in a signed dtype.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
INTEGERS = sorted((d for d in MOVABLE if not d.is_floating_point and not d.is_complex), key=str)
dtypes = st.one_of(st.sampled_from(DTYPES), st.sampled_from([*INTEGERS, torch.complex64, torch.complex128]))
layouts = st.sampled_from([None, *LAYOUTS.values()])


def signed(x):
    return x.view(SIGNED.get(x.dtype, x.dtype))


class Maker:
    """Draws the tensors of one example: torch's generator fills them, from a drawn seed; hypothesis draws layouts."""

    def __init__(self, data):
        self.draw = data.draw
        self.random = torch.Generator().manual_seed(self.draw(st.integers(0, 2**31)))

    def laid(self, t):
        layout = self.draw(layouts)
        other = layout(t) if layout is not None and t.numel() else None
        return (t if other is None else other).to(DEVICE)

    def numbers(self, shape, dtype):
        if dtype.is_floating_point or dtype.is_complex:
            parts = HURTS[torch.randint(len(HURTS), (2, *shape), generator=self.random)]
            return self.laid((torch.complex(*parts) if dtype.is_complex else parts[0]).to(dtype))
        bits = torch.randint(-(2**63), 2**63 - 1, shape, generator=self.random)
        if dtype == torch.bool:
            return self.laid(bits > 0)
        return self.laid(bits.to(SIGNED.get(dtype, dtype))).view(dtype)

    def mask(self, shape):
        keep = self.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
        return self.laid(torch.rand(shape, generator=self.random) < keep)

    def narrowed(self, shape, fewer=False):
        """Returns a shape that broadcasts to `shape`. fewer: leading dims may be missing."""
        start = self.draw(st.integers(0, len(shape))) if fewer else 0
        return tuple(1 if self.draw(st.integers(0, 3)) == 0 else n for n in shape[start:])

    def index(self, shape, size):
        dtype = self.draw(st.sampled_from([torch.int32, torch.int64]))
        index = torch.randint(-1, size + 1, shape, generator=self.random).to(dtype)
        far = torch.tensor([-100, 255, torch.iinfo(dtype).min, torch.iinfo(dtype).max], dtype=dtype)
        stray = far[torch.randint(4, shape, generator=self.random)]
        return self.laid(torch.where(torch.rand(shape, generator=self.random) < 0.05, stray, index))


def fits(fill, dtype):
    """Returns the number `fill` saturated to the range of the dtype."""
    if dtype == torch.bool:
        return bool(fill)
    if dtype.is_floating_point or dtype.is_complex:
        largest = torch.finfo(dtype).max
        return max(-largest, min(largest, float(fill))) if math.isfinite(fill) else fill
    info = torch.iinfo(dtype)
    number = int(max(info.min, min(info.max, fill)))
    return torch.tensor(number, dtype=dtype).view(SIGNED.get(dtype, dtype)).item()


def assert_moved(what, got, want):
    got, want = (torch.view_as_real(t) if t.is_complex() else signed(t) for t in (got, want))
    if got.is_floating_point():  # the bits of a NaN are not compared
        got, want = (torch.where(t.isnan(), math.nan, t) for t in (got, want))
    assert_same_bits(what, got, want, "not what was selected")


def judge(route, name, sample, maker):
    op, definition = on(route, name), getattr(definitions, name)
    dtype, kwargs = sample.args[0].dtype, dict(sample.kwargs)
    if "fill_value" in kwargs:
        kwargs["fill_value"] = fits(kwargs["fill_value"], dtype)
    want = outputs(definition(*map(signed_if_tensor, sample.args), **kwargs))
    for i, (a, b) in enumerate(zip(outputs(op(*sample.args, **sample.kwargs)), want, strict=True)):
        assert a.dtype == (dtype if i == 0 else torch.int64)
        assert_moved(f"value {i}", a, b)
    if not dtype.is_floating_point:
        return
    layout = maker.draw(layouts)

    def upstream(out):
        laid = layout(make_upstream(out)) if layout is not None and out.numel() else None
        return make_upstream(out) if laid is None else laid

    got = run(op, sample, upstream)
    subject = Subject(op, definition, (sample,), dtype_rule="input", device=DEVICE)
    truth = subject.truth(sample, got.upstream)
    truth.terms = 0.0, subject.truth(sample, [got.upstream[0].abs()]).grads  # sum |terms|: gradients may be sums
    assert_right(sample, [(what, t) for what, t in got if what.startswith("gradient")], truth)
    if "fill_value" in kwargs:
        ones = torch.ones_like(sample.args[0], dtype=torch.bool)
        used = outputs(definition(ones, *sample.args[1:], **{**kwargs, "fill_value": False}))[0]
        poisoned = run(op, sample, [torch.where(used, got.upstream[0], math.nan)])
        for key, grad in poisoned.grads.items():
            assert_same_bits("gradient", grad, got.grads[key], "changed by the upstream gradient of a stand-in")


def signed_if_tensor(x):
    return signed(x) if isinstance(x, torch.Tensor) else x


@each_route
@BOUNDED
@given(st.data())
def test_masked_compact(route, data):
    make, shape = Maker(data), data.draw(SHAPES)
    lead = data.draw(st.sampled_from([len(shape), data.draw(st.integers(0, len(shape)))]))
    keep = make.mask(make.narrowed(shape[:lead]))
    count = int(keep.expand(shape[:lead]).sum())
    capacity = data.draw(st.sampled_from([0, 1, max(0, count - 1), count, count + 1, 2 * count + 40]))
    options = {"capacity": capacity, "fill_value": data.draw(st.sampled_from(FILLS))}
    x = make.numbers(shape, data.draw(dtypes))
    judge(route, "masked_compact", Sample((x, keep), options, mask=1), make)


@each_route
@BOUNDED
@given(st.data())
def test_masked_select(route, data):
    make, shape = Maker(data), data.draw(SHAPES)
    full = data.draw(st.booleans())
    x = make.numbers(shape if full else make.narrowed(shape, fewer=True), data.draw(dtypes))
    keep = make.mask(shape if not full else make.narrowed(shape, fewer=True))
    judge(route, "masked_select", Sample((x, keep), mask=1), make)


@each_route
@BOUNDED
@given(st.data())
def test_masked_scatter(route, data):
    make, shape = Maker(data), data.draw(SHAPES)
    full, dtype = data.draw(st.booleans()), data.draw(dtypes)
    x = make.numbers(shape if full else make.narrowed(shape, fewer=True), dtype)
    mask = make.mask(shape if not full else make.narrowed(shape, fewer=True))
    count = int(mask.expand(torch.broadcast_shapes(x.shape, mask.shape)).sum())
    length = data.draw(st.sampled_from([0, max(0, count - 1), count, count + 1, 2 * count + 40]))
    source = make.numbers((length,) if length % 2 else (2, length // 2), dtype)
    judge(route, "masked_scatter", Sample((x, mask, source), mask=1, mask_keeps=False), make)


@each_route
@BOUNDED
@given(st.data())
def test_safe_gather(route, data):
    make, shape = Maker(data), data.draw(SHAPES)
    dim = data.draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    picked = [data.draw(st.integers(n // 2, n)) for n in shape]  # index may be smaller than x but for dim
    if shape:
        picked[dim] = data.draw(st.sampled_from([0, 1, 3, 17, 100]))
        picked[dim] = picked[dim] if math.prod(picked) < 40_000 else 1
    index = make.index(tuple(picked), shape[dim] if shape else 1)
    options = {"dim": dim, "index": index, "fill_value": data.draw(st.sampled_from(FILLS))}
    judge(route, "safe_gather", Sample((make.numbers(shape, data.draw(dtypes)),), options), make)


@each_route
@BOUNDED
@given(st.data())
def test_safe_index_select(route, data):
    make, shape = Maker(data), data.draw(SHAPES)
    dim = data.draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    length = data.draw(st.sampled_from([0, 1, 3, 17, 100])) if shape and math.prod(shape) < 400 else 1
    index = make.index((length,) if length != 1 or data.draw(st.booleans()) else (), shape[dim] if shape else 1)
    options = {"dim": dim, "index": index, "fill_value": data.draw(st.sampled_from(FILLS))}
    judge(route, "safe_index_select", Sample((make.numbers(shape, data.draw(dtypes)),), options), make)

"""kl_div_with_logits, js_div_with_logits, tv_with_logits and their backward agree with the definitions in fp64."""

import pytest
import torch
from safeops.kernels.divergences import divergence, divergence_backward
from safeops.kernels.engine import row_plan as row

from safeops.core.op import registry
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, close, fill, in_order

NAN, INF = float("nan"), float("inf")
NAMES = ["kl_div_with_logits", "js_div_with_logits", "tv_with_logits"]
# name -> (shape, memory order or None): rows along memory and across it, in one tile and in several
LAYOUTS = {
    "rows": ((5, 40), None),
    "odd rows": ((3, 37), None),
    "long rows": ((2, 5000), None),
    "very long row": ((1, 35001), None),
    "odd long row": ((4301,), None),
    "rows across memory": ((2, 9, 33), (0, 2, 1)),
    "long rows across memory": ((2, 20, 300), (0, 2, 1)),
    "no two fuse": ((2, 3, 2, 5), (3, 1, 0, 2)),
    "one class": ((4, 1), None),
    "no rows": ((0, 5), None),
    "no classes": ((3, 0), None),
}
each_divergence = pytest.mark.parametrize("name", NAMES)
# A test of layouts runs for js, the divergence that computes the most; `make test-exhaustive` runs it for all.
one_divergence = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("js") else pytest.mark.exhaustive) for name in NAMES]
)
LARGE = "very long row", "long rows across memory"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about garbage in rows that are not kept


@pytest.fixture(autouse=True)
def small_registers(monkeypatch):
    """Makes the longest row that a block holds whole 2,048 to 4,096 elements, so that longer ones are read in parts."""
    monkeypatch.setattr(row, "PER_THREAD", 32)


def example(layout, dtypes=(F32, F32)):
    """Returns (input, target, keep), with garbage where rows are not kept."""
    shape, order = LAYOUTS[layout]
    x, y = (2 * in_order(shape, order or tuple(range(len(shape))), dtype, i) for i, dtype in enumerate(dtypes))
    keep = torch.rand(shape[:-1], generator=torch.Generator().manual_seed(3)) < 0.8
    for t, garbage in ((x, NAN), (y, INF)):
        t.masked_fill_(~keep.unsqueeze(-1), garbage)
    return x, y, keep


def check(name, x, y, keep=None, temperature=1.0, beta=0.5):
    loss, numbers = getattr(divergence, name)(x, y, keep, temperature, beta)
    leaves = [t.double().requires_grad_() for t in (x, y)]
    want = registry[name].definition(*leaves, keep, temperature, beta)
    assert loss.dtype == numbers.dtype and loss.shape == want.shape
    size = 10 + max(float(t.detach().nan_to_num(0, 0, 0).abs().max()) if t.numel() else 0 for t in leaves)
    close(loss, want.detach(), torch.full_like(want, size), loss.dtype)
    grad = fill(loss.shape, F32, 9).to(loss.dtype)
    slopes = torch.autograd.grad(want, leaves, grad.double())
    backward = getattr(divergence_backward, f"{name}_backward")
    for needed in ((True, True), (True, False), (False, True)):
        result = backward(grad, x, y, numbers, keep, temperature, beta, *needed)
        for d, slope, t, wanted in zip(result, slopes, (x, y), needed):
            assert d.dtype == t.dtype and (d.stride() == torch.empty_like(t).stride() if wanted else d.numel() == 0)
            if wanted and d.numel():
                close(d, slope, torch.full_like(slope, size * float(grad.abs().max()) / temperature), t.dtype)
    return loss, result


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in LARGE])
@each_divergence
def test_layouts(name, layout):
    check(name, *example(layout), temperature=0.75, beta=0.25)


@pytest.mark.parametrize("layout", LARGE)
@one_divergence
def test_large_layouts(name, layout):
    check(name, *example(layout), temperature=0.75, beta=0.25)


@pytest.mark.parametrize("dtypes", [(BF16, F32), (F16, BF16), (F64, F32), (F32, F64)], ids=str)
@one_divergence
def test_dtypes(name, dtypes):
    check(name, *example("rows", dtypes))
    check(name, *example("long rows", dtypes), temperature=2.0)


@pytest.mark.parametrize("layout", ["rows", "long rows", "rows across memory"])
@each_divergence
def test_classes_that_do_not_exist(name, layout):
    x, y, keep = example(layout)
    x[..., 2:4] = y[..., 1:4] = -INF
    check(name, x, y, keep)
    x[..., 1] = -INF
    if name != "kl_div_with_logits":
        y[..., 1] = 0.5
        check(name, x, y, keep)


@pytest.mark.parametrize("layout", ["rows", "long rows"])
@each_divergence
def test_a_class_that_the_input_alone_excludes(name, layout):
    x, y, _ = example(layout)
    x, y = x.nan_to_num(0), y.nan_to_num(0, 0)
    x[0, 3] = -INF
    loss, numbers = getattr(divergence, name)(x, y)
    assert loss.isinf().tolist() == [name == "kl_div_with_logits", *[False] * (len(x) - 1)]


@pytest.mark.parametrize("layout", ["rows", "long rows"])
@each_divergence
def test_equal_logits_and_rows_that_are_no_distributions(name, layout):
    x, _, _ = example(layout)
    x = x.nan_to_num(0)
    loss, slopes = check(name, x, x.clone())
    assert not loss.any()
    for garbage in (NAN, INF):
        other = x.clone()
        other[0, 5] = garbage
        for pair in ((x, other), (other, x)):
            loss, _ = getattr(divergence, name)(*pair)
            assert loss[0].isnan() and not loss[1:].any()
    other[0] = -INF
    assert getattr(divergence, name)(x, other)[0][0].isnan()


@pytest.mark.parametrize("layout", ["rows", "odd rows", "long rows", "rows across memory", "no classes"])
@each_divergence
def test_sums_of_a_part_of_the_classes(name, layout):
    """Given row_stats of whole rows, the sums over each part of the classes add up to the forward's sums."""
    if name == "kl_div_with_logits":
        pytest.skip("its parts add up by their shares")
    for dtypes in ((F32, F32), (BF16, F64)):
        x, y, keep = example(layout, dtypes)
        x[..., 2:4] = y[..., 3:4] = -INF
        loss, numbers = getattr(divergence, name)(x, y, keep, 0.75, 0.25)
        size = 10 + max(float(t.nan_to_num(0, 0, 0).abs().max()) if t.numel() else 0 for t in (x, y))
        total, half = 0, x.shape[-1] // 3
        for part in (slice(half), slice(half, None)):
            some = x[..., part], y[..., part]
            sums = getattr(divergence, f"{name}_sums")(*some, numbers, keep, 0.75, 0.25)
            definition = registry[name].sums(*some, numbers, keep, 0.75, 0.25)
            close(sums, definition, torch.full_like(sums, size).double(), sums.dtype)
            total = total + sums
        want = torch.stack([*numbers[4:], loss])
        close(total, want, torch.full_like(want, size).double(), want.dtype)


@pytest.mark.parametrize("layout", ["rows", "long rows", "rows across memory"])
@each_divergence
def test_only_a_row_without_classes_has_a_spread_of_none(name, layout):
    """A rank on which all of a row's classes are -inf adds nothing to that row; a rank with a NaN among them adds
    NaN."""
    x, _, _ = example(layout)
    x = x.nan_to_num(0)
    other = torch.full_like(x, -INF)
    other[(0,) * (x.dim() - 1)][5] = NAN
    for pair in ((x, other), (other, x)):
        loss, numbers = getattr(divergence, name)(*pair)
        spread = numbers[3 if pair[1] is other else 1].flatten()
        assert loss.isnan().all() and [bool(t == -INF) for t in spread] == [False] + [True] * (len(spread) - 1)

"""multi_margin_loss and its backward agree with the definition in fp64 and its autograd."""

import pytest
import torch
import triton.runtime.interpreter as interpreter
from safeops.kernels.classification import multi_margin_loss as margin
from safeops.kernels.classification.multi_margin_loss import multi_margin_loss as losses
from safeops.kernels.classification.multi_margin_loss import multi_margin_loss_backward as slopes
from safeops.kernels.engine import indexing, launch
from safeops.kernels.engine import row_plan as row

from safeops.ops.classification.multi_margin_loss import define
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, check_of_rows, close, fill, in_order, shifted

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about garbage in rows that are not kept

# name -> (shape, memory order or None): the classes are the last dim, along memory or across it
LAYOUTS = {
    "rows": ((5, 40), None),
    "odd rows": ((3, 37), None),
    "long rows": ((2, 600), None),
    "odd long row": ((301,), None),
    "images": ((2, 32, 9), (0, 2, 1)),
    "odd images": ((2, 17, 5), (0, 2, 1)),
    "long columns": ((20, 170), (1, 0)),
    "no two fuse": ((2, 3, 2, 5), (3, 1, 0, 2)),
    "one class": ((4, 1), None),
    "one number": ((1,), None),
    "no rows": ((0, 5), None),
    "no classes": ((3, 0), None),
}
SPLIT = ("long rows", "odd long row", "long columns")


@pytest.fixture(autouse=True)
def more_splits(monkeypatch):
    monkeypatch.setattr(row.tiling, "POLICY", row.tiling.POLICY._replace(blocks=32))


def example(layout, dtype=F32):
    """Returns (x, class index of each row; -1: no class), with garbage in rows without a class."""
    shape, order = LAYOUTS[layout]
    x = in_order(shape, order or tuple(range(len(shape))), dtype, 1)
    generator = torch.Generator().manual_seed(2)
    place = torch.randint(0, max(shape[-1], 1), shape[:-1], generator=generator)
    if len(shape) > 1 or not shape[-1]:
        place.view(-1)[1::3] = -1
    place = place if shape[-1] else place - place - 1
    x.masked_fill_((place < 0).unsqueeze(-1), NAN)
    return x, place


def check(x, place, margin=1.0, p=1, grad=None):
    grad = torch.where(place < 0, NAN, fill(place.shape, F32, 9)) if grad is None else grad
    wide = F64 if x.dtype == F64 else F32
    (loss, keep), dx = losses(x, place, margin=margin, p=p), slopes(grad, x, place, margin=margin, p=p)
    assert torch.equal(keep, place >= 0)
    leaf = x.double().requires_grad_()
    wanted = define(leaf, place, None, None, margin, p)[0]
    (slope,) = torch.autograd.grad(wanted, leaf, grad.double().nan_to_num(0))
    assert loss.dtype == wide and dx.dtype == x.dtype and dx.stride() == torch.empty_like(x).stride()
    assert not loss[place < 0].any() and not dx[place < 0].any()
    close(loss, wanted.detach(), dtype=wide)
    close(dx, slope, slope.abs().max() if slope.numel() else None, x.dtype)


def variants():
    return [plan.values for plan in launch._plans.values() if "SQUARE" in plan.constants]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("p", [1, 2])
def test_layouts(layout, p):
    check(*example(layout), p=p, margin=0.75)
    assert any(v["splits"] > 1 for v in variants()) == (layout in SPLIT)


@pytest.mark.parametrize("layout, dtype", [("long rows", F16), ("rows", BF16), ("rows", F16), ("images", F64)])
@pytest.mark.parametrize("p", [1, 2])
def test_dtypes(layout, dtype, p):
    check(*example(layout, dtype), p=p)


@pytest.mark.parametrize("shape, order", [((1, 4300), (0, 1)), ((2, 2300), (1, 0))])
def test_long_rows_of_which_there_are_enough(shape, order, monkeypatch):
    """Where the rows outnumber the counters, one block reads all pieces of a row and adds them up itself."""
    monkeypatch.setattr(row, "COUNTERS", 0)
    monkeypatch.setitem(LAYOUTS, "many", (shape, order))
    check(*example("many"), p=2)
    assert all(v["pieces"] > 1 and v["splits"] == 1 for v in variants()) and variants()


def test_any_strides():
    x, place = example("rows")
    check(shifted(x), place)
    check(x[:1].expand(5, 40), place[:1].expand(5), grad=torch.tensor(1.5).expand(5))
    check(x[:, ::2], place // 2, grad=fill((5,), F64, 3))
    check(x, place, -0.5, grad=fill((5,), F16, 3))


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("layout", ["rows", "odd long row", "odd images", "long columns", "one number"])
def test_class_weights_and_masks(layout, p):
    """A row whose class has weight 0 adds nothing to the mean's sum but counts in its divisor; a masked row does
    neither."""
    x, place = example(layout)
    weight = torch.rand(x.shape[-1], generator=torch.Generator().manual_seed(4), dtype=F64) + 0.5
    weight[place.flatten()[-1:].clamp(min=0)] = 0
    mask = torch.arange(place.numel()).view(place.shape) % 4 != 2
    x = x.masked_fill((mask.logical_not() | (weight[place.clamp(min=0)] == 0)).unsqueeze(-1), NAN)
    options = weight, mask, 0.75, p
    loss, keep = losses(x, place.int(), *options)
    leaf = x.double().requires_grad_()
    wanted, counts = define(leaf, place, *options)
    assert torch.equal(keep, counts)
    close(loss, wanted.detach(), dtype=F32)
    grad = fill(place.shape, F32, 9)
    (slope,) = torch.autograd.grad(wanted, leaf, grad.double())
    close(slopes(grad, x, place, *options), slope, slope.abs().max() + 1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("layout", ["rows", "long rows", "odd long row", "odd images", "one number", "nothing kept"])
def test_of_rows(layout, weighted):
    """The mean divides by the number of rows with a class, whatever their weights."""
    x, place = example("rows" if layout == "nothing kept" else layout, BF16)
    place = place * 0 - 1 if layout == "nothing kept" else place
    weight = torch.linspace(0, 2, x.shape[-1]) if weighted else None
    check_of_rows(
        lambda *reduction: margin.multi_margin_loss_reduced(x, place, weight, None, 0.75, 2, *reduction),
        lambda *grad: (margin.multi_margin_loss_reduced_backward(*grad, x, place, weight, None, 0.75, 2),),
        (*losses(x, place, weight, None, 0.75, 2), None),
        lambda grad: (slopes(grad, x, place, weight, None, 0.75, 2),),
        False,
    )


@pytest.mark.parametrize("length", [20, 600])
def test_at_the_hinge_the_slope_is_0(length):
    """At the hinge the slope is 0 even for an upstream inf, with p = 1 and p = 2."""
    x = torch.zeros(2, length)
    x[:, 1], x[1, length - 1] = 1.0, 0.5
    place, grad = torch.tensor([1, 1]), torch.full((2,), INF)
    for p in (1, 2):
        close(losses(x, place, p=p)[0], torch.tensor([0, 0.5**p / length], dtype=F64))
        dx = slopes(grad, x, place, p=p)
        assert not dx[0].any() and (dx[1] != 0).nonzero().view(-1).tolist() == [1, length - 1]
        assert dx[1, 1] == -INF and dx[1, length - 1] == INF


@pytest.mark.parametrize("length", [20, 600])
@pytest.mark.parametrize("p", [1, 2])
def test_what_exists_shows(length, p):
    """NaN or inf at the target's class or at another class shows in its own row alone. Gradients are autograd's, except
    at the target's class: there the definition computes x - x = inf - inf, the kernel minus the sum of the other
    classes' gradients."""
    x, last = fill((6, length), F32, 1), length - 1
    x[0, last], x[1, last], x[2, 3], x[3, 3], x[4, 3], x[4, last] = NAN, INF, -INF, INF, NAN, INF
    place = torch.full((6,), 3)
    leaf = x.clone().requires_grad_()
    wanted = define(leaf, place, p=p)[0]
    (slope,) = torch.autograd.grad(wanted, leaf, torch.ones(6))
    slope[:, 3] = 0
    slope[:, 3] = -slope.sum(1)
    close(losses(x, place, p=p)[0], wanted.detach().double())
    dx = slopes(torch.ones(6), x, place, p=p)
    close(dx, slope.double(), torch.tensor(20.0))


def test_a_place_out_of_range_is_a_row_that_does_not_exist():
    """A row with a class index out of range does not count; its index must not be used to read a logit."""
    x, place = fill((3, 20), F32, 1), torch.tensor([20, 1, 2**40])
    (loss, keep), dx = losses(x, place), slopes(torch.ones(3), x, place)
    assert (
        keep.tolist() == [False, True, False]
        and loss[1] > 0
        and dx[1].any()
        and not loss[::2].any()
        and not dx[::2].any()
    )


def test_a_gradient_too_large_for_half_is_inf():
    x, place = fill((2, 24), F16, 1), torch.tensor([3, 5])
    assert slopes(torch.full((2,), 1e7), x, place, margin=10.0)[0, 3] == -INF


def test_whichever_block_is_first(monkeypatch):
    """The results have the same bits in any order of the blocks and with 64-bit offsets, and the counters end at 0."""
    counters = torch.zeros(64, dtype=torch.int32)
    monkeypatch.setattr(row.tiling, "split_counters", lambda device: counters)
    x, place = example("long rows")

    def every():
        options = {"margin": 0.75, "p": 2}
        of_rows = margin.multi_margin_loss_reduced(x, place, **options)
        return losses(x, place, **options)[0], slopes(torch.ones(2), x, place, **options), *of_rows

    def same(a, b):
        return all(torch.equal(s, t) for s, t in zip(a, b)) and not counters.any()

    first = every()
    builder = interpreter.interpreter_builder
    in_order = builder.set_grid_idx
    last = lambda *index: in_order(*(n - 1 - i for i, n in zip(index, builder.grid_dim)))  # noqa: E731
    monkeypatch.setattr(builder, "set_grid_idx", last)
    assert same(first, every())
    monkeypatch.setattr(indexing, "INT32_LIMIT", 0)
    launch._plans.clear()
    assert same(first, every())
    assert all(plan.signature["space"].M == "i64" for plan in launch._plans.values())

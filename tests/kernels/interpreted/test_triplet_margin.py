"""triplet_margin_loss and its backward agree with the definition in fp64 and its autograd."""

import pytest
import torch
from safeops.kernels.engine import indexing, launch
from safeops.kernels.vectors import triplet_margin_loss as forwards
from safeops.kernels.vectors import triplet_margin_loss_backward as backwards
from safeops.kernels.vectors.triplet_margin_loss import triplet_margin_loss
from safeops.kernels.vectors.triplet_margin_loss_backward import triplet_margin_loss_backward

from safeops.ops.vectors.triplet_margin_loss import definition
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, check_of_rows, close, fill, in_order, shifted

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns about garbage in rows that are not kept

# name -> (shape, memory order or None): vectors along the last dim, along memory or across it
LAYOUTS = {
    "rows": ((5, 40), None),
    "odd rows": ((3, 37), None),
    "long rows": ((2, 300), None),
    "odd long row": ((301,), None),
    "images": ((2, 20, 70), (0, 2, 1)),
    "long columns": ((20, 70), (1, 0)),
    "no two fuse": ((2, 3, 2, 5), (3, 1, 0, 2)),
    "one number": ((1,), None),
    "no rows": ((0, 5), None),
    "no numbers": ((3, 0), None),
}
SPLIT = ("long rows", "odd long row", "images", "long columns")


def example(layout, *dtypes):
    shape, order = LAYOUTS[layout]
    dtypes = dtypes or (F32,) * 3
    return [in_order(shape, order or tuple(range(len(shape))), dtype, seed) for seed, dtype in enumerate(dtypes, 1)]


def check(vectors, margin=1.0, eps=1e-6, swap=False, keep=None, grad=None):
    rows, wide = vectors[0].shape[:-1], F64 if F64 in [x.dtype for x in vectors] else F32
    grad = fill(rows, F32, 9) if grad is None else grad
    if keep is not None:
        grad = torch.where(keep, grad, 0)
    options = margin, eps, swap
    loss, *distances = triplet_margin_loss(*vectors, keep, margin, 2.0, eps, swap)
    slopes = triplet_margin_loss_backward(grad, *vectors, *distances, *options, True, True, True)
    leaves = [x.double().requires_grad_() for x in vectors]
    wanted = definition(*leaves, keep, margin, 2.0, eps, swap)
    assert loss.dtype == wide and all(x.dtype == F64 for x in distances)
    close(loss, wanted.detach(), distances[0] + distances[1] + margin, wide)
    for dx, x, want in zip(slopes, vectors, torch.autograd.grad(wanted, leaves, grad.double())):
        assert dx.dtype == x.dtype and dx.stride() == torch.empty_like(x).stride()
        assert keep is None or not dx[~keep].any()
        close(dx, want, torch.tensor(3.0), x.dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("swap", [False, True])
def test_layouts(layout, swap):
    check(example(layout), swap=swap)
    assert any(plan.values["splits"] > 1 for plan in launch._plans.values()) == (layout in SPLIT)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("layout", ["rows", "long rows", "odd long row", "images", "one number", "nothing kept"])
def test_of_rows(layout, swap):
    vectors = example("rows" if layout == "nothing kept" else layout, BF16, F32, F32)
    rows = vectors[0].shape[:-1]
    keep = torch.arange(rows.numel()).view(rows) % 3 != 1
    keep = keep & (layout != "nothing kept")
    vectors = [torch.where(keep.unsqueeze(-1), x, NAN) for x in vectors]
    loss, *distances = triplet_margin_loss(*vectors, keep, 1.0, 2.0, 1e-6, swap)
    options = 1.0, 1e-6, swap, True, True, True
    check_of_rows(
        lambda *reduction: forwards.triplet_margin_loss_reduced(*vectors, keep, 1.0, 2.0, 1e-6, swap, *reduction),
        lambda grad, by, *d: backwards.triplet_margin_loss_reduced_backward(grad, by, *vectors, *d, *options),
        (loss, keep, None),
        lambda grad: triplet_margin_loss_backward(grad, *vectors, *distances, *options),
        False,
    )


@pytest.mark.parametrize("dtypes", [(F16,) * 3, (BF16,) * 3, (F64,) * 3, (BF16, F32, F16), (F32, F64, F16)], ids=str)
def test_dtypes(dtypes):
    for layout in ("rows", "long rows"):
        check(example(layout, *dtypes), swap=True)


def test_any_strides_and_rows_that_do_not_exist():
    a, b, c = example("rows")
    keep = torch.tensor([True, False, True, True, False])
    check((shifted(a), b, c[:1].expand(5, 40)), swap=True, grad=torch.tensor(1.5).expand(5))
    dirty = [torch.where(keep.unsqueeze(-1), x, NAN) for x in (a, b, c)]
    check(dirty, swap=True, keep=keep)
    check(dirty, keep=keep, grad=torch.full((5,), NAN))
    check([x[:, ::2] for x in (a, b, c)], margin=4.0, eps=0.25, swap=True)


@pytest.mark.parametrize("length", [20, 600])
def test_equal_vectors_are_at_distance_0(length):
    """Equal vectors are at distance 0, also over several tiles. With one difference, even below eps, the distance is
    not 0."""
    a, c = fill((2, length), F32, 1), fill((2, length), F32, 2)
    b = a.clone()
    b[1, -1] += 1e-3
    for eps in (0.0, 1e-2):
        check((a, b, c), margin=40.0, eps=eps, swap=True)
        assert triplet_margin_loss(a, b, c, None, 1.0, 2.0, eps, False)[1][0] == 0


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_squares_out_of_range(size):
    check([x * size for x in example("long rows")], margin=size, eps=0.0, swap=True)


def test_what_exists_shows():
    """NaN and inf show in their own row alone."""
    vectors = example("rows")
    for x, value in zip(vectors, (NAN, INF, -INF)):
        dirty = [y.clone() if y is x else y for y in vectors]
        dirty[[y is x for y in vectors].index(True)][1, 3] = value
        loss, *distances = triplet_margin_loss(*dirty, None, 1.0, 2.0, 1e-6, True)
        wanted = definition(*dirty, None, 1.0, 2.0, 1e-6, True)
        close(loss, wanted.double())
        slopes = triplet_margin_loss_backward(torch.ones(5), *dirty, *distances, 1.0, 1e-6, True, True, True, True)
        assert all(dx[[0, 2, 3, 4]].isfinite().all() for dx in slopes)
        assert any(not dx[1].isfinite().all() for dx in slopes) or wanted[1] == 0


def test_offsets_of_64_bits(monkeypatch):
    monkeypatch.setattr(indexing, "INT32_LIMIT", 0)
    launch._plans.clear()
    check(example("long rows"), swap=True)
    assert all(plan.signature["space"].M == "i64" for plan in launch._plans.values())

"""box_iou_loss per row and its backward agree with the definition in fp64 and its autograd."""

import pytest
import torch
from safeops.kernels.engine import indexing, launch
from safeops.kernels.vectors import box_iou_loss as kernel

from safeops.core.domain import box
from safeops.ops.vectors.box_iou_loss import KINDS, define
from tests.kernels.interpreted.truth import BF16, F16, F32, F64, check_of_rows, close, fill

LAYOUTS = {  # memory layouts of (N, 4) boxes
    "dense": lambda x: x,
    "odd": lambda x: torch.cat((x, x), 1)[:, 1:5].copy_(x),
    "across": lambda x: x.mT.contiguous().mT,
    "one row": lambda x: x[:1],
    "images": lambda x: x[:20].reshape(2, 10, 4).transpose(0, 1),
    "no rows": lambda x: x[:0],
}
each_kind = pytest.mark.parametrize("kind", range(4), ids=KINDS)


def pairs(layout, *dtypes, size=1.0):
    """Returns two tensors of boxes. Some pairs are equal or touch, some boxes are points or lines, and each operand has
    one box with exchanged corners."""
    x, y = (box(fill((300, 4), F64, seed)) * size for seed in (1, 2))
    x[:20] = y[:20]
    x[20:40, 2], x[30:40, 3] = x[20:40, 0], x[30:40, 1]
    y[35:40] = x[35:40]
    x[40:60, 0] = torch.minimum(y[40:60, 0], x[40:60, 2])
    x[60], y[61] = x[60].flip(0), y[61].flip(0)
    return tuple(LAYOUTS[layout](t.to(dtype)) for t, dtype in zip((x, y), dtypes or (F32, F32)))


def check(x, y, kind, mask=None, size=1.0):
    wide = F64 if F64 in (x.dtype, y.dtype) else F32
    leaves = [t.double().requires_grad_() for t in (x, y)]
    want, keep = define(*leaves, mask, kind)
    loss, kept = kernel.box_iou_loss(x, y, mask, kind)
    assert loss.dtype == wide and torch.equal(kept, keep)
    close(loss, want.detach(), torch.tensor(4.0), wide)
    grad = fill(loss.shape, F32, 3) / 64
    slopes = kernel.box_iou_loss_backward(grad, x, y, mask, kind, True, True)
    for got, slope, t in zip(slopes, torch.autograd.grad(want, leaves, grad.double()), (x, y)):
        assert got.dtype == t.dtype and got.shape == t.shape
        close(got.double() * size, slope * size, 8 + 8 * (slope * size).abs(), t.dtype)
    assert not loss[~keep].any() and not any(slope[~keep].any() for slope in slopes)
    return loss, slopes


@each_kind
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, kind):
    x, y = pairs(layout)
    check(x, y, kind)
    check(x, y, kind, fill(x.shape[:-1], F32, 4) > 0)


@each_kind
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F16, F32), (F64, F64)], ids=str)
def test_dtypes(dtypes, kind):
    check(*pairs("dense", *dtypes), kind)
    check(*pairs("odd", *dtypes), kind)


@each_kind
@pytest.mark.parametrize("dtype, size", [(F32, 1e20), (F32, 1e-20), (BF16, 1e20), (F16, 4000.0)])
def test_areas_neither_overflow_nor_vanish(dtype, size, kind):
    check(*pairs("dense", dtype, dtype, size=size), kind, size=size)


@each_kind
def test_equal_boxes(kind):
    x = pairs("dense")[0]
    x = x[((x[:, 2:] - x[:, :2]) > 0).all(1)]
    loss, slopes = check(x, x.clone(), kind)
    assert not loss.any() and not any(slope.any() for slope in slopes)


@each_kind
def test_what_is_not_a_number_shows(kind):
    x, y = pairs("dense")
    x[100, 0], y[101, 3], y[102, 2] = float("nan"), float("nan"), float("inf")
    loss, _ = kernel.box_iou_loss(x, y, None, kind)
    slopes = kernel.box_iou_loss_backward(torch.ones(300), x, y, None, kind, True, True)
    assert loss.isnan().nonzero().view(-1).tolist() == [100, 101, 102]
    assert all(slope.isnan().any(-1).nonzero().view(-1).tolist() == [100, 101, 102] for slope in slopes)
    mask = ~loss.isnan()
    loss, _ = kernel.box_iou_loss(x, y, mask, kind)
    slopes = kernel.box_iou_loss_backward(torch.full((300,), float("nan")), x, y, mask & False, kind, True, True)
    assert loss.isfinite().all() and not any(slope.any() for slope in slopes)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_rows(layout, masked):
    x, y = pairs(layout, BF16, BF16)
    if not x.numel():
        return
    mask = fill(x.shape[:-1], F32, 4) > 0 if masked else None
    check_of_rows(
        lambda *reduction: kernel.box_iou_loss_reduced(x, y, mask, 3, *reduction),
        lambda *grad: kernel.box_iou_loss_reduced_backward(*grad, x, y, mask, 3, True, True),
        (*kernel.box_iou_loss(x, y, mask, 3), None),
        lambda grad: kernel.box_iou_loss_backward(grad, x, y, mask, 3, True, True),
        False,
    )


def test_a_gradient_too_large_for_half_is_inf():
    x, y = pairs("dense", F16, F16)
    slopes = kernel.box_iou_loss_backward(torch.full((300,), 1e8), x, y, None, 2, True, False)
    assert slopes[0][100:].isinf().any() and not slopes[1].numel()


def test_offsets_of_64_bits(monkeypatch):
    x, y = pairs("odd")
    first = kernel.box_iou_loss(x, y, None, 3)
    monkeypatch.setattr(indexing, "INT32_LIMIT", 0)
    launch._plans.clear()
    assert all(torch.equal(a, b) for a, b in zip(first, kernel.box_iou_loss(x, y, None, 3)))
    assert all(plan.signature["space"].M == "i64" for plan in launch._plans.values())

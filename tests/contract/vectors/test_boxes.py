"""box_iou_loss: its four kinds at any scale; boxes that are equal, empty, upside down or not finite."""

import pytest
import torch

import safeops
from safeops.core import check
from safeops.core.domain import box
from safeops.ops.vectors import box_iou_loss as file
from tests.contract.common import on
from tests.ops.record import DEVICE
from tests.ops.vectors.box_iou_loss import box_iou

pytestmark = pytest.mark.parametrize("route", ["kernel", "composite"])
KINDS = file.KINDS
NAN, INF = float("nan"), float("inf")


def boxes(n, seed, dtype=torch.float32, size=1.0):
    x = torch.rand(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * size
    return box(x).to(dtype).to(DEVICE)


def t(*rows, dtype=torch.float32):
    return torch.tensor(rows, dtype=dtype, device=DEVICE)


def outcome(route, x, y, kind, **options):
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    loss = on(route, "box_iou_loss")(x, y, kind=kind, reduction="none", **options)
    return loss.detach(), *torch.autograd.grad(loss, (x, y), torch.arange(1.0, len(loss) + 1, device=DEVICE).to(loss))


def truth(x, y, kind):
    x, y = x.double().requires_grad_(), y.double().requires_grad_()
    loss = box_iou(x, y, kind)
    return loss.detach(), *torch.autograd.grad(loss, (x, y), torch.arange(1.0, len(loss) + 1, device=DEVICE).double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "dtype, size",
    [(torch.float64, 1.0), (torch.float32, 1e20), (torch.float32, 1e-20), (torch.float16, 4000.0),
     (torch.bfloat16, 1e20)],
)  # fmt: skip
def test_the_formula_at_any_size(route, kind, dtype, size):
    """Loss and gradient must be right where areas overflow: 4,000 x 4,000 pixels in fp16, 1e20 x 1e20 in fp32."""
    x, y = boxes(300, 1, dtype, size), boxes(300, 2, dtype, size)
    results, wanted = outcome(route, x, y, kind), truth(x, y, kind)
    assert results[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(results[0].double(), wanted[0], rtol=1e-6, atol=1e-6)
    rough = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
    for slope, want in zip(results[1:], wanted[1:]):
        assert slope.dtype == dtype
        torch.testing.assert_close(slope.double() * size, want * size, rtol=rough, atol=300 * rough)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_equal_boxes_have_loss_0_and_gradient_0(route, kind, dtype):
    x = boxes(300, 1, dtype, 4000.0)
    loss, *slopes = outcome(route, x, x.clone(), kind)
    assert not loss.any()
    for slope in slopes:  # exactly 0, but for the rounding of autograd's giou
        assert not slope.any() if route == "kernel" else (slope.abs() * 4000 < 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_empty_boxes_have_finite_values(route, kind):
    """Loss and slopes are finite for a point and itself, a point in a box, a line and itself, a line across a box, and
    two lines that cross."""
    x = t([2, 2, 2, 2], [1, 1, 1, 1], [0, 1, 4, 1], [2, -1, 2, 3], [0, 1, 2, 1])
    y = t([2, 2, 2, 2], [0, 0, 2, 2], [0, 1, 4, 1], [0, 0, 4, 4], [1, 0, 1, 2])
    loss, *slopes = outcome(route, x, y, kind)
    assert (loss >= 1).all() and all(slope.isfinite().all() for slope in (loss, *slopes))
    assert loss[0] == loss[2] == 1 and not any(slope[0].any() for slope in slopes)
    torch.testing.assert_close(loss[:3], box_iou(x, y, kind)[:3])
    points, y = boxes(300, 1)[:, [0, 1, 0, 1]], boxes(300, 2)
    for a, b in ((points, y), (y, points)):  # a point has no aspect ratio to round
        torch.testing.assert_close(outcome(route, a, b, kind)[0], box_iou(a.double(), b.double(), kind).float())


def test_the_papers_numbers(route):
    """The losses equal the papers' formulas, computed by hand, for boxes that overlap by half, touch, or lie apart."""
    x, y = t([0, 0, 2, 2], [0, 0, 1, 1], [0, 0, 1, 1]), t([1, 0, 2, 2], [1, 0, 2, 1], [3, 0, 4, 1])
    f = on(route, "box_iou_loss")
    torch.testing.assert_close(f(x, y, reduction="none"), torch.tensor([0.5, 1, 1], device=DEVICE))
    torch.testing.assert_close(f(x, y, kind="giou", reduction="none"), torch.tensor([0.5, 1, 1.5], device=DEVICE))
    distance = torch.tensor([0.25 / 8, 1 / 5, 9 / 17], device=DEVICE)
    wanted = torch.tensor([0.5, 1, 1], device=DEVICE) + distance
    torch.testing.assert_close(f(x, y, kind="diou", reduction="none"), wanted)
    v = (2 / torch.pi * (torch.tensor(1.0).atan() - torch.tensor(0.5).atan())) ** 2
    wanted[0] += v * v / (0.5 + v)
    torch.testing.assert_close(f(x, y, kind="ciou", reduction="none"), wanted)


def test_the_shape_of_a_box_beside_one_that_is_much_larger(route):
    """Beside a much larger box, the difference of the two aspect ratios must keep its digits, with either box as
    input."""
    corners, sizes = torch.rand(2, 500, 2) * 100, torch.rand(2, 500, 2) * 500 + 50
    f = on(route, "box_iou_loss")
    for ratio in (1.0, 1e-2, 1e-4):
        boxes = [torch.cat([c, c + s * r], 1).to(DEVICE) for c, s, r in zip(corners, sizes, (1.0, ratio))]
        for x, y in (boxes, boxes[::-1]):
            want = f(x.double(), y.double(), kind="ciou", reduction="none")
            got = f(x, y, kind="ciou", reduction="none")
            torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_number_shows_in_its_row_alone(route, kind):
    x, y = boxes(9, 1), boxes(9, 2)
    want = outcome(route, x, y, kind)
    for i in range(4):
        x[i, i], y[4 + i, i] = NAN, NAN
    x[8, 2] = INF
    results = outcome(route, x, y, kind)
    assert results[0].isnan().all() and all(slope.isnan().any(-1).all() for slope in results[1:])
    keep = torch.arange(9, device=DEVICE) == -1
    loss, *slopes = outcome(route, x, y, kind, mask=keep)
    assert not loss.any() and not any(slope.any() for slope in slopes)
    x[0], y[4] = boxes(9, 1)[0], boxes(9, 2)[4]
    some = outcome(route, x, y, kind)
    assert all(torch.equal(a[[0, 4]], b[[0, 4]]) for a, b in zip(some, want))


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_upside_down_do_not_exist(route, kind, monkeypatch):
    """On a CPU an upside-down box is an error if kept and left out if masked. Where a check would wait for a GPU, it is
    always left out."""
    x, y = boxes(5, 1), boxes(5, 2)
    x[1], y[3] = x[1].flip(0), y[3].flip(0)
    x[4, 0] = NAN
    keep = torch.tensor([True, False, True, False, True], device=DEVICE)
    f = on(route, "box_iou_loss")
    want = f(x[::2], y[::2], kind=kind, reduction="none")
    assert torch.equal(f(x, y, kind=kind, mask=keep, reduction="none")[::2].nan_to_num(9), want.nan_to_num(9))
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match=r"^box_iou_loss: input has the box \[.*\] with x2 < x1 or y2 < y1"):
            f(x, y, kind=kind)
        with pytest.raises(ValueError, match="^box_iou_loss: target has the box"):
            f(x[2:], y[2:], kind=kind)
    mean = torch.func.vmap(lambda a, b: safeops.box_iou_loss(a, b, kind=kind))(x[None, :4], y[None, :4])
    torch.testing.assert_close(mean[0], want[:2].mean())
    reports = []
    monkeypatch.setattr(check, "watchers", [lambda index, size, counts: reports.append(int(counts.sum()))])
    file.define(x, y, None, 0)
    assert reports == [1, 1]


def test_no_rows(route):
    x = torch.zeros(0, 4, device=DEVICE, requires_grad=True)
    loss = on(route, "box_iou_loss")(x, x)
    assert loss == 0 and torch.autograd.grad(loss, x)[0].shape == (0, 4)


def test_alpha_is_a_constant_of_the_gradient(route):
    """As in the paper, alpha is a constant: the gradient of alpha v is alpha times the gradient of v."""
    x, y = boxes(50, 1, torch.float64).requires_grad_(), boxes(50, 2, torch.float64)
    f = on(route, "box_iou_loss")
    (slope,) = torch.autograd.grad(f(x, y, kind="ciou", reduction="sum"), x)
    (other,) = torch.autograd.grad(f(x, y, kind="diou", reduction="sum"), x)
    w, h = (x[:, 2] - x[:, 0]), (x[:, 3] - x[:, 1])
    v = (2 / torch.pi * (torch.atan((y[:, 2] - y[:, 0]) / (y[:, 3] - y[:, 1])) - torch.atan(w / h))) ** 2
    alpha = (v / (f(x, y, reduction="none") + v)).detach()
    torch.testing.assert_close(slope - other, torch.autograd.grad((alpha * v).sum(), x)[0])

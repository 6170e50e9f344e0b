"""ordinal_loss: the papers' loops over the questions, what predictions follow, rows that are left out."""

import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core.op import registry
from tests.contract.common import DEVICE, flags, grad_of, leaf
from tests.ops.operands import data, mask, weights

ROWS, CLASSES = 40, 6


def batch(dtype=torch.float64):
    target = (data(ROWS, seed=3, low=0.0, high=CLASSES - 1e-6)).long().to(DEVICE)
    return data(ROWS, CLASSES - 1).to(DEVICE, dtype).requires_grad_(), target


def test_corn_is_the_authors_loop():
    """The loss sums over the rows that each question is asked, and divides by how many those are."""
    x, y = batch()
    total, asked = 0.0, 0
    for k in range(CLASSES - 1):
        rows = y > k - 1
        above = (y[rows] > k).double()
        total = total - (F.logsigmoid(x[rows, k]) * above + (F.logsigmoid(x[rows, k]) - x[rows, k]) * (1 - above)).sum()
        asked += int(rows.sum())
    got = safeops.ordinal_loss(x, y)
    torch.testing.assert_close(got, total / asked)
    torch.testing.assert_close(grad_of(got, x), grad_of(total / asked, x))


def test_coral_is_the_authors_formula():
    x, y = batch()
    levels = torch.tensor([[1.0] * c + [0.0] * (CLASSES - 1 - c) for c in y.tolist()], device=DEVICE).double()
    want = (-(F.logsigmoid(x) * levels + (F.logsigmoid(x) - x) * (1 - levels)).sum(1)).mean()
    got = safeops.ordinal_loss(x, y, kind="coral")
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad_of(got, x), grad_of(want, x))


@pytest.mark.parametrize("kind", ["corn", "coral"])
def test_weights_are_repeated_rows(kind):
    """A row of weight 2 must count as two rows, in the loss and in what the mean divides by."""
    x, y = batch()
    count = torch.arange(ROWS, device=DEVICE) % 3
    got = safeops.ordinal_loss(x, y, kind=kind, weight=count.double())
    want = safeops.ordinal_loss(x.repeat_interleave(count, 0), y.repeat_interleave(count), kind=kind)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad_of(got, x), grad_of(want, x))


@pytest.mark.parametrize("kind", ["corn", "coral"])
def test_rows_that_are_masked_out(kind):
    """Garbage logits and classes of masked-out rows must change nothing; an upstream NaN there reaches nothing."""
    x, y = batch(torch.float32)
    keep, w = mask(ROWS).to(DEVICE), weights(ROWS).float().to(DEVICE)
    clean = safeops.ordinal_loss(x, y, kind=kind, mask=keep, weight=w, reduction="none")
    upstream = torch.where(keep, 1.0, math.nan)
    (want,) = torch.autograd.grad(clean, x, upstream, retain_graph=True)
    for value in (math.nan, math.inf, -math.inf):
        dirty = torch.where(keep.unsqueeze(-1), x, value).detach().requires_grad_()
        got = safeops.ordinal_loss(dirty, torch.where(keep, y, 99), kind=kind, mask=keep, weight=w, reduction="none")
        assert torch.equal(got, clean) and (got[~keep] == 0).all()
        (dx,) = torch.autograd.grad(got, dirty, upstream)
        assert torch.equal(dx, want) and (dx[~keep] == 0).all()


def test_questions_that_a_row_is_not_asked_may_hold_anything():
    """Corn's logits beyond a row's class do not exist: their gradient must be 0, also where they are NaN."""
    x = leaf([[0.5, math.nan, math.nan], [0.5, 0.25, -math.inf], [math.inf, 1.0, 2.0]])
    y = torch.tensor([0, 1, 3], device=DEVICE, dtype=torch.uint8)
    loss = safeops.ordinal_loss(x, y, reduction="none")
    assert loss.isfinite().all()
    assert torch.equal(
        grad_of(loss.sum(), x) != 0, flags(True, False, False, True, True, False, False, True, True).view(3, 3)
    )


def test_the_predicted_class():
    """Trained on its own targets, each kind must predict them by the docstring's expression."""
    y = torch.arange(4, device=DEVICE)
    for kind, predict in (
        ("coral", lambda x: (x.sigmoid() > 0.5).sum(-1)),
        ("corn", lambda x: (x.sigmoid().cumprod(-1) > 0.5).sum(-1)),
    ):
        x = torch.zeros(4, 3, device=DEVICE, requires_grad=True)
        for _ in range(3):
            x = (x - 20 * grad_of(safeops.ordinal_loss(x, y, kind=kind), x)).detach().requires_grad_()
        assert torch.equal(predict(x), y)


def test_sizes():
    for shape in ((0, 3), (3, 0), (0,), (2, 3, 4)):
        x = torch.ones(shape, device=DEVICE, requires_grad=True)
        target = torch.zeros(shape[:-1], dtype=torch.int32, device=DEVICE)
        loss = safeops.ordinal_loss(x, target)
        want = F.softplus(torch.ones(())).item() if 0 not in shape else 0
        assert math.isclose(loss.item(), want, rel_tol=1e-6) and grad_of(loss, x).shape == shape


def test_the_kernels_that_compute_it(monkeypatch):
    calls = []
    for part in registry["ordinal_loss"].parts:
        call = part.call
        monkeypatch.setattr(part, "call", lambda *a, part=part, call=call: calls.append(part.name) or call(*a))
    safeops.ordinal_loss(*batch(torch.float16))
    assert calls[:3] == ["binary_cross_entropy_with_logits", "masked_sum", "masked_count"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["corn", "coral"])
def test_it_compiles_whole(kind):
    def loss(x, y):
        return safeops.ordinal_loss(x, y, kind=kind)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 40):
        x, y = (t[:n] for t in batch(torch.float32))
        results = compiled(x, y), loss(x, y)
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(grad_of(r, x) for r in results))

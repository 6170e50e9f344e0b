"""supervised_contrastive_loss: its authors' code, NT-Xent, rows without a positive or left out."""

import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from safeops.core import private_torch
from tests.contract.common import DEVICE, each_route, flags, on
from tests.contract.vectors.test_row_losses import each_reduction, vectors

NAN, INF = math.nan, math.inf
NAME = "supervised_contrastive_loss"
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def supcon(features, labels, temperature=0.07):
    """Computes SupConLoss of github.com/HobbitLong/SupContrast for one view a row. Returns (losses, has_positive)."""
    z = F.normalize(features, dim=1)
    mask = torch.eq(labels[:, None], labels).to(z.dtype)
    logits = z @ z.T / temperature
    logits = logits - logits.max(dim=1, keepdim=True)[0].detach()
    others = 1 - torch.eye(len(z), dtype=z.dtype, device=z.device)
    mask = mask * others
    log_prob = logits - torch.log((torch.exp(logits) * others).sum(1, keepdim=True))
    loss = -(mask * log_prob).sum(1) / mask.sum(1).clamp(min=1)
    return loss, mask.sum(1) > 0


def operands(dtype=torch.float64, n=9, classes=3, length=6):
    (x,) = vectors(n, length, count=1, dtype=dtype)
    return x, torch.arange(n, device=DEVICE) * 5 % 7 % classes


@each_route
@each_reduction
@each_dtype
@pytest.mark.parametrize("temperature", [0.07, 1.0, 30])
def test_its_authors(route, reduction, dtype, temperature):
    x, labels = operands(dtype)
    labels[4] = 100  # no other row has this label
    losses, counted = supcon(x, labels, temperature)
    assert counted.sum() == 8
    losses = torch.where(counted, losses, 0)
    theirs = {"none": losses, "sum": losses.sum(), "mean": losses.sum() / counted.sum()}[reduction]
    ours = on(route, NAME)(x, labels, temperature=temperature, reduction=reduction)
    allowed = 32 * torch.finfo(dtype).eps / min(temperature, 1)
    torch.testing.assert_close(ours, theirs, rtol=allowed, atol=allowed)
    got, want = (torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=allowed, atol=allowed * float(want.abs().max()))
    assert got[4].abs().sum() > 0  # row 4 is a negative for the others


@each_route
def test_nt_xent_is_its_case_of_two_views(route):
    """NT-Xent is the case of two views: 2 N rows, each with one positive, as SimCLR's loss is usually written."""
    x, _ = operands(n=10)
    z = F.normalize(x, dim=1)
    logits = (z @ z.T / 0.5).fill_diagonal_(-INF)
    theirs = F.cross_entropy(logits, torch.arange(10, device=DEVICE).roll(5))
    ours = on(route, NAME)(x, torch.arange(5, device=DEVICE).repeat(2), temperature=0.5)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x))


@each_route
def test_a_masked_row_is_neither_anchor_nor_positive_nor_negative(route):
    x, labels = operands()
    keep = flags(True, False, True, True, False, True, True, True, False)
    losses, counted = supcon(x[keep], labels[keep])
    want = losses[counted].mean()
    (dwant,) = torch.autograd.grad(want, x)
    for garbage in (NAN, INF, 1e300):
        dirty = torch.where(keep[:, None], x.detach(), garbage).requires_grad_()
        for options in ({"mask": keep}, {"weight": torch.where(keep, 2.0, 0.0)}):
            got = on(route, NAME)(dirty, labels, **options)
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(torch.autograd.grad(got, dirty)[0], dwant)


@each_route
def test_the_weights_of_rows(route):
    x, labels = operands()
    labels[4] = 100  # row 4 has no positive: neither its loss nor its weight counts
    weight = (torch.arange(9, device=DEVICE) / 4.0 + 0.25).double().requires_grad_()
    losses, counted = supcon(x, labels)
    want = (losses * weight)[counted].sum() / weight[counted].sum()
    got = on(route, NAME)(x, labels, weight=weight)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, weight)) for y in (got, want)))


@each_route
@pytest.mark.parametrize("n", [0, 1, 4])
def test_no_row_has_a_positive(route, n):
    x, labels = operands(n=n)[0], torch.arange(n, device=DEVICE)
    loss = on(route, NAME)(x, labels)
    assert loss == 0 and not torch.autograd.grad(loss, x)[0].any()
    assert on(route, NAME)(x, labels, empty="nan").isnan()
    with pytest.raises(ValueError, match=f"{NAME}: empty"):
        on(route, NAME)(x, labels, empty="raise")


@each_route
def test_a_kept_nan_shows(route):
    x, labels = operands()
    dirty = x.detach().clone()
    dirty[4] = NAN
    assert on(route, NAME)(dirty, labels).isnan()


@each_route
def test_a_temperature_zero_vectors_and_halves(route):
    x, labels = operands()
    temperature = torch.tensor(0.3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    got = on(route, NAME)(x, labels, temperature=temperature)
    losses, counted = supcon(x, labels, temperature)
    torch.testing.assert_close(*(torch.autograd.grad(y, (x, temperature)) for y in (got, losses[counted].mean())))
    zero = torch.where(torch.arange(9, device=DEVICE)[:, None] == 1, 0, x.detach()).requires_grad_()
    (d,) = torch.autograd.grad(on(route, NAME)(zero, labels), zero)
    assert d.isfinite().all() and not d[1].any() and d[0].any()
    for dtype in (torch.float16, torch.bfloat16):
        large = (x.detach() * 300).to(dtype)
        got, want = (on(route, NAME)(y, labels, temperature=0.01, reduction="none") for y in (large, large.double()))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=64 * 2**-24 / 0.01)


def test_second_order_and_forward_mode():
    x, labels = operands(n=4, classes=2, length=3)

    def loss(x):
        return safeops.supervised_contrastive_loss(x, labels, temperature=0.5)

    assert torch.autograd.gradcheck(loss, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, x, check_fwd_over_rev=True)


def test_no_autocast_in_the_products():
    x, labels = operands(torch.float32)
    want = safeops.supervised_contrastive_loss(x, labels)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        got = safeops.supervised_contrastive_loss(x, labels)
        (dgot,) = torch.autograd.grad(got, x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(dgot, torch.autograd.grad(want, x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    """The sizes of a batch must share one graph. (torch counts a second attempt at a graph as another graph.)"""
    torch._dynamo.reset()
    counter = private_torch.counting_backend("aot_eager")
    compiled = torch.compile(safeops.supervised_contrastive_loss, backend=counter, dynamic=dynamic, fullgraph=True)
    for n in (9, 12, 15) if dynamic else (9,):
        for dtype in (torch.float32, torch.bfloat16):
            x, labels = operands(dtype, n=n)
            keep = torch.arange(n, device=DEVICE) != 4
            want, got = (f(x, labels, mask=keep) for f in (safeops.supervised_contrastive_loss, compiled))
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(*(torch.autograd.grad(y, x) for y in (got, want)))
    assert counter.frame_count <= 4  # two dtypes, two attempts each

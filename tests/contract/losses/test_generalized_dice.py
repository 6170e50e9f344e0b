"""generalized_dice_loss: what the contract's clauses and the tests of the other region losses do not cover."""

import math

import pytest
import torch

import safeops
from safeops.testing import no_synchronisation
from tests.contract.common import DEVICE, each_route, on, t

PLAIN = {"smooth_nr": 0.0, "smooth_dr": 0.0}


def monai(input, target, smooth=1e-5, batch=False):
    """Computes the loss as MONAI's GeneralizedDiceLoss does."""
    dims = [0] * batch + [*range(2, input.dim())]
    both, ground, prediction = (input * target).sum(dims), target.sum(dims), input.sum(dims)
    w = 1 / (ground * ground)
    infinite = w.isinf()
    w = torch.where(infinite, 0, w)
    w = w + infinite * w.max(-1, keepdim=True)[0]
    return 1 - (2 * (both * w).sum(-1) + smooth) / ((w * (ground + prediction)).sum(-1) + smooth)


def images(classes=4, empty=(), dtype=torch.float64):
    """Returns (probabilities, class indices, one-hot target); the classes in `empty` have no pixel."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, classes, 8, 9, generator=g, dtype=torch.float64).softmax(1).to(dtype)
    index = torch.randint(classes, (3, 8, 9), generator=g)
    for c in empty:
        index = torch.where(index == c, (c + 1) % classes, index)
    return x.to(DEVICE), index.to(DEVICE), torch.nn.functional.one_hot(index, classes).movedim(-1, 1).to(DEVICE, dtype)


@each_route
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("smooth", [0.0, 1e-5])
@pytest.mark.parametrize("empty", [(), (1,), (0, 3)])
def test_it_is_monais(route, batch, smooth, empty):
    x, index, target = images(empty=empty)
    x.requires_grad_()
    options = {"smooth_nr": smooth, "smooth_dr": smooth, "batch": batch}
    want = monai(x, target, smooth, batch)
    (slope,) = torch.autograd.grad(want.mean(), x)
    for y in (index, target):
        assert on(route, "generalized_dice_loss")(x, y, reduction="none", **options).shape == want.shape
        loss = on(route, "generalized_dice_loss")(x, y, **options)
        torch.testing.assert_close(loss, want.mean(), rtol=1e-12, atol=0)
        torch.testing.assert_close(torch.autograd.grad(loss, x)[0], slope, rtol=1e-10, atol=1e-16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_large_classes_in_half(dtype):
    """In fp16 a sum over 2^17 pixels is inf, and 1 / sum^2 is 0 from 4096 pixels on: both must be computed wider."""
    x = (
        torch.rand(1, 2, 2**18, generator=torch.Generator().manual_seed(0))
        .softmax(1)
        .to(DEVICE, dtype)
        .requires_grad_()
    )
    index = (torch.arange(2**18, device=DEVICE) < 8).long()[None]
    target = torch.nn.functional.one_hot(index, 2).movedim(-1, 1)
    wide = x.detach().double().requires_grad_()
    want = monai(wide, target.double(), 0.0).mean()
    loss = safeops.generalized_dice_loss(x, index, **PLAIN)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    (got,), (slope,) = torch.autograd.grad(loss, x), torch.autograd.grad(want, wide)
    torch.testing.assert_close(got.double(), slope, rtol=1e-2, atol=2**-24)
    if dtype == torch.float16:
        assert not monai(x.detach(), target.to(dtype), 0.0).isfinite().all()


def test_a_class_that_does_not_exist_changes_nothing():
    x, index, target = images()
    broken = x.clone()
    broken[:, 2] = math.nan
    broken.requires_grad_()
    weight = t(1.0, 1.0, 0.0, 2.0)
    loss = safeops.generalized_dice_loss(broken, target, weight=weight, **PLAIN)
    kept = [0, 1, 3]
    w = weight[kept] / target[:, kept].sum((2, 3)) ** 2
    both, total = ((v[:, kept]).sum((2, 3)) for v in (x * target, x + target))
    torch.testing.assert_close(loss, (1 - 2 * (w * both).sum(1) / (w * total).sum(1)).mean())
    grad = torch.autograd.grad(loss, broken)[0]
    assert grad.isfinite().all() and (grad[:, 2] == 0).all()
    assert safeops.generalized_dice_loss(broken, target, **PLAIN).isnan()


def test_no_class_has_a_pixel():
    """Without smoothing the quotient is 0 / 0: the loss is 0, not NaN."""
    x = torch.rand(2, 3, 5, device=DEVICE, requires_grad=True)
    for options, want in (PLAIN, 0.0), ({"smooth_nr": 1.0, "smooth_dr": 4.0}, 0.75):
        loss = safeops.generalized_dice_loss(x, torch.zeros_like(x), **options)
        assert loss == want and not torch.autograd.grad(loss, x)[0].any()
    keep = torch.tensor([True, False], device=DEVICE).view(2, 1, 1)
    for empty in ("zero", "nan"):
        loss = safeops.generalized_dice_loss(x, x.detach(), mask=keep, empty=empty, reduction="none")
        assert loss[0] > 0 and str(loss[1].item()) == {"zero": "0.0", "nan": "nan"}[empty]
        mean = safeops.generalized_dice_loss(x, x.detach(), mask=keep)
        torch.testing.assert_close(mean, loss[0])
    with pytest.raises(ValueError, match='^generalized_dice_loss: empty="raise"'):
        safeops.generalized_dice_loss(x, x, mask=keep & ~keep, empty="raise")
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        nothing = torch.zeros(shape, device=DEVICE)
        assert safeops.generalized_dice_loss(nothing, nothing) == 0


def test_derivatives_by_a_soft_target_and_the_weight():
    x = torch.rand(2, 3, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    y = torch.rand(2, 3, 5, dtype=torch.float64, device=DEVICE, requires_grad=True)
    weight = torch.rand(3, dtype=torch.float64, device=DEVICE, requires_grad=True)

    def loss(x, y, weight):
        return safeops.generalized_dice_loss(x, y, weight=weight)

    assert torch.autograd.gradcheck(loss, (x, y, weight)) and torch.autograd.gradgradcheck(loss, (x, y, weight))


@pytest.mark.slow
def test_it_waits_for_nothing_and_compiles():
    x, index, _ = images(dtype=torch.float32)
    with no_synchronisation(DEVICE):
        want = safeops.generalized_dice_loss(x, index)
    compiled = torch.compile(safeops.generalized_dice_loss, fullgraph=True)
    torch.testing.assert_close(compiled(x, index), want)
    assert torch.equal(torch.ops.safeops.generalized_dice_loss(x, index), want)
    assert torch.equal(safeops.nn.GeneralizedDiceLoss()(x, index), want)

"""softmax_focal_loss beside MONAI's and cross_entropy, and rows whose class is certain or impossible."""

import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from tests.contract.common import DEVICE, each_route, equal, on, t

NAN, INF = math.nan, math.inf
NAME = "softmax_focal_loss"
each_gamma = pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0, 3.5])
each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


def operands(*shape, dtype=torch.float32, size=3.0):
    g = torch.Generator().manual_seed(0)
    x = (size * torch.randn(shape, generator=g, dtype=torch.float64)).to(DEVICE, dtype).requires_grad_()
    return x, torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=g).to(DEVICE)


def written_out(x, target, weight=None, gamma=2.0):
    """Computes the loss of each row by the paper's formula."""
    p = x.softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    loss = -((1 - p) ** gamma) * p.log()
    return loss if weight is None else loss * weight[target]


@each_route
@each_gamma
@pytest.mark.parametrize("shape", [(9, 6), (2, 5, 3, 4)])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_formula(route, gamma, shape, weighted):
    x, target = operands(*shape, dtype=torch.float64)
    weight = torch.rand(shape[1], dtype=x.dtype, device=DEVICE).requires_grad_() if weighted else None
    leaves = [x, weight] if weighted else [x]
    losses = written_out(x, target, weight, gamma)
    count = weight[target].sum() if weighted else target.numel()
    for reduction, want in {"none": losses, "sum": losses.sum(), "mean": losses.sum() / count}.items():
        ours = on(route, NAME)(x, target, weight, gamma=gamma, reduction=reduction)
        torch.testing.assert_close(ours, want)
        got, want = (torch.autograd.grad(y.sum(), leaves, retain_graph=True) for y in (ours, want))
        torch.testing.assert_close(got, want)


@pytest.mark.slow
@each_route
@each_gamma
@each_reduction
def test_monais(route, gamma, reduction):
    losses = pytest.importorskip("monai.losses")
    x, target = operands(3, 5, 8, 7)
    theirs = losses.FocalLoss(to_onehot_y=True, use_softmax=True, gamma=gamma, reduction="none")
    theirs = theirs(x, target.unsqueeze(1)).sum(1)  # the loss is 0 for all classes but the target
    theirs = {"mean": theirs.mean(), "sum": theirs.sum(), "none": theirs}[reduction]
    ours = on(route, NAME)(x, target, gamma=gamma, reduction=reduction)
    torch.testing.assert_close(ours, theirs)
    got, want = (torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@each_route
@each_reduction
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gamma_0_is_weighted_cross_entropy(route, reduction, dtype):
    """Losses are equal to the bit without class weights; with them to rounding, as each op applies them elsewhere."""
    x, target = operands(9, 6, dtype=dtype)
    target[1] = -100
    weight = torch.rand(6, device=DEVICE)
    for w, exact in ((None, True), (weight, False)):
        ours = on(route, NAME)(x, target, w, gamma=0, reduction=reduction)
        theirs = on(route, "cross_entropy")(x, target, weight=w, reduction=reduction)
        torch.testing.assert_close(ours, theirs, **({"rtol": 0, "atol": 0} if exact and reduction == "none" else {}))
        got, want = (torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs))
        torch.testing.assert_close(got, want)


@each_route
@each_gamma
@pytest.mark.parametrize("row", [(200.0, 0.0), (0.0, -INF), (INF, 0.0)])
def test_a_certain_row_costs_nothing(route, gamma, row):
    x = t(*row).unsqueeze(0).requires_grad_()
    loss = on(route, NAME)(x, torch.zeros(1, dtype=torch.int64, device=DEVICE), gamma=gamma)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert loss == 0 and equal(first, [[0, 0]]) and equal(second, [[0, 0]])


@each_route
@each_gamma
def test_an_impossible_class_costs_inf_and_nan_shows(route, gamma):
    target = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    x = t(-INF, 0.0).unsqueeze(0).requires_grad_()
    loss = on(route, NAME)(x, target, gamma=gamma)
    assert loss == INF and equal(torch.autograd.grad(loss, x)[0], [[-1, 1]])
    assert on(route, NAME)(t(NAN, 0.0).unsqueeze(0), target, gamma=gamma).isnan()


@each_route
def test_rows_that_do_not_exist(route):
    """Rows dropped by mask, row weight, class weight or ignore_index bring no NaN from logits or upstream gradients."""
    x, target = operands(6, 4, dtype=torch.float64)
    target[:] = torch.tensor([0, 1, 2, 3, -100, 1])
    weight, row_weight = t(1.0, 2.0, 0.5, 0.0).double(), t(1.0, 1.0, 0.0, 1.0, 1.0, 3.0).double()
    mask = torch.arange(6, device=DEVICE) != 1
    kept = torch.tensor([0, 5], device=DEVICE)
    dirty = x.detach().clone()
    dirty[1:5] = NAN
    dirty.requires_grad_()
    options = {"mask": mask, "row_weight": row_weight}
    loss = on(route, NAME)(dirty, target, weight, reduction="none", **options)
    want = written_out(x, target.clamp(min=0), weight) * row_weight
    assert (loss[1:5] == 0).all()
    torch.testing.assert_close(loss[kept], want[kept])
    upstream = torch.full_like(loss, NAN)
    upstream[kept] = 1
    (got,) = torch.autograd.grad(loss, dirty, upstream)
    (dwant,) = torch.autograd.grad(want[kept].sum(), x)
    assert (got[1:5] == 0).all()
    torch.testing.assert_close(got, dwant)
    mean = on(route, NAME)(dirty, target, weight, **options)
    torch.testing.assert_close(mean, (want[0] + want[5]) / 7)


def test_out_of_range_as_cross_entropy():
    x, target = operands(9, 6)
    target[3] = 6
    if DEVICE == "cpu":
        with pytest.raises(IndexError, match="softmax_focal_loss: target 6 is out of range for the 6 classes"):
            safeops.softmax_focal_loss(x, target)
    else:
        keep = torch.arange(9, device=DEVICE) != 3
        assert torch.equal(safeops.softmax_focal_loss(x, target), safeops.softmax_focal_loss(x, target, mask=keep))


@each_gamma
def test_derivatives(gamma):
    x, target = operands(4, 3, dtype=torch.float64)
    weight = torch.rand(3, dtype=torch.float64, device=DEVICE).requires_grad_()

    def loss(x, weight):
        return safeops.softmax_focal_loss(x, target, weight, gamma=gamma)

    assert torch.autograd.gradcheck(loss, (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, (x, weight))


def test_torchs_module_with_class_weights():
    x, target = operands(9, 6)
    weight = torch.rand(6, device=DEVICE)
    loss = safeops.nn.SoftmaxFocalLoss(weight=weight, gamma=0.0).to(DEVICE)
    torch.testing.assert_close(loss(x, target), F.cross_entropy(x, target, weight))

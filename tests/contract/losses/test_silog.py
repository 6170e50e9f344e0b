"""silog_loss: which pixels count, perfect predictions, the ops that compute it."""

import math

import pytest
import torch

import safeops
from safeops.core.op import registry
from safeops.testing import no_synchronisation
from tests.contract.common import DEVICE, each_route, grad_of, on, t
from tests.ops import definitions

NAN, INF = math.nan, math.inf


def depths(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=g) * 9 + 0.5).to(DEVICE, dtype)


@each_route
@pytest.mark.parametrize("none", [0.0, -0.0, -1.0, NAN, INF, -INF])
def test_a_pixel_without_a_depth_does_not_exist(route, none):
    x, y = depths(2, 4, 5), depths(2, 4, 5, seed=1)
    y[0, 1], y[1, :, 2] = none, none
    measured = (y > 0) & y.isfinite()
    x[~measured] = NAN
    x.requires_grad_(), y.requires_grad_()
    loss = on(route, "silog_loss")(x, y)
    g = (x[measured].log() - y[measured].log()).double()
    torch.testing.assert_close(loss.double(), (g.square().mean() - 0.85 * g.mean() ** 2).sqrt(), rtol=1e-6, atol=0)
    for grad in torch.autograd.grad(loss, (x, y)):
        assert grad.isfinite().all() and not grad[~measured].any() and grad[measured].all()


@each_route
def test_a_kept_nan_of_the_input_shows(route):
    x, y = depths(2, 5), depths(2, 5, seed=1)
    for wrong in (NAN, 0.0, -1.0, INF):
        broken = x.clone()
        broken[0, 1] = wrong
        assert not on(route, "silog_loss")(broken, y).isfinite()
        images = on(route, "silog_loss")(broken, y, batch=False, reduction="none")
        assert not images[0].isfinite()
        torch.testing.assert_close(images[1], on(route, "silog_loss")(x[1:], y[1:]))
        keep = torch.ones(2, 5, dtype=torch.bool, device=DEVICE)
        keep[0, 1] = False
        assert on(route, "silog_loss")(broken, y, mask=keep).isfinite()


@each_route
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("variance_focus", [0.0, 0.85, 1.0])
def test_a_perfect_prediction_has_loss_0_and_gradient_0(route, dtype, variance_focus):
    y = depths(3, 70, dtype=dtype)
    x = y.clone().requires_grad_()
    loss = on(route, "silog_loss")(x, y, variance_focus=variance_focus)
    assert loss == 0 and loss.requires_grad
    assert torch.equal(grad_of(loss, x), torch.zeros_like(x))


@pytest.mark.parametrize("scale", [1 + 2**-10, 1000.0])
def test_nothing_cancels(scale):
    """With variance_focus=1 the loss is the root of the variance of g = log(input / target), which must not be computed
    as E[g^2] - E[g]^2: that cancels where E[g], the log of the scale, is large."""
    y = depths(100_000, dtype=torch.float64)
    x = y * scale * (1 + 1e-3 * torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2)).to(y))
    x, y = x.float(), y.float()
    want = definitions.silog_loss(x.double(), y.double(), variance_focus=1.0)
    torch.testing.assert_close(safeops.silog_loss(x, y, variance_focus=1.0).double(), want, rtol=1e-5, atol=0)


def test_half_is_read_and_not_computed_in():
    x, y = depths(4, 30, 30, dtype=torch.float16), depths(4, 30, 30, dtype=torch.float16, seed=1)
    x.requires_grad_()
    loss = safeops.silog_loss(x, y)
    wide = x.detach().double().requires_grad_()
    want = definitions.silog_loss(wide, y.double())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(grad_of(loss, x).double(), grad_of(want, wide), rtol=2**-10, atol=2**-24)


@each_route
def test_nothing_measured(route):
    x, y = depths(2, 5).requires_grad_(), depths(2, 5, seed=1)
    y[0] = 0
    none = on(route, "silog_loss")(x, y, batch=False, reduction="none", empty="nan")
    assert none[0].isnan() and none[1] > 0
    mean = on(route, "silog_loss")(x, y, batch=False)
    assert mean == none[1] and not grad_of(mean, x)[0].any()
    y[1] = NAN
    for empty, want in (("zero", "0.0"), ("nan", "nan")):
        loss = on(route, "silog_loss")(x, y, empty=empty)
        assert str(loss.item()) == want and not grad_of(loss, x).any()
    for batch, reduction in ((True, "mean"), (False, "mean"), (False, "none")):
        with pytest.raises(ValueError, match='^silog_loss: empty="raise"'):
            on(route, "silog_loss")(x, y, empty="raise", batch=batch, reduction=reduction)
    for shape in ((0,), (0, 3), (3, 0)):
        assert on(route, "silog_loss")(x.new_zeros(shape), x.new_zeros(shape)) == 0


def test_derivatives():
    x, y = (
        depths(2, 6, dtype=torch.float64).requires_grad_(),
        depths(2, 6, dtype=torch.float64, seed=1).requires_grad_(),
    )
    weight = depths(6, dtype=torch.float64, seed=2).requires_grad_()

    def loss(x, y, weight):
        return safeops.silog_loss(x, y, weight=weight, batch=False, variance_focus=0.5)

    assert torch.autograd.gradcheck(loss, (x, y, weight)) and torch.autograd.gradgradcheck(loss, (x, y, weight))


@pytest.mark.slow
def test_it_is_made_of_kernels_waits_for_nothing_and_compiles():
    ratio, error, *_ = registry["silog_loss"].parts
    assert ratio.cpu and ratio.raw == ("_log_ratio", "_log_ratio_backward")
    assert error.cpu and error.raw == ("_silog_loss", "_statistic_backward")
    x, y = depths(2, 6, 7), depths(2, 6, 7, seed=1)
    with no_synchronisation(DEVICE):
        want = safeops.silog_loss(x, y)
    torch.testing.assert_close(torch.compile(safeops.silog_loss, fullgraph=True)(x, y), want)
    assert torch.equal(torch.ops.safeops.silog_loss(x, y), want)
    assert torch.equal(safeops.nn.SILogLoss()(x, y), want)
    assert torch.equal(safeops.silog_loss(x, y, weight=t(1.0)), want)


def test_a_depth_of_0_is_predicted():
    depth = depths(2, 3).requires_grad_()
    x = (depth.detach() * t(0.0, 1.0, 2.0)).half().requires_grad_()
    assert safeops.silog_loss(x, depth).isinf() or safeops.silog_loss(x, depth).isnan()
    loss = safeops.silog_loss(x, depth, eps=1e-4)
    (grad,) = torch.autograd.grad(loss, x)
    assert loss.isfinite() and grad.isfinite().all() and (grad[:, 0] < 0).all()
    assert safeops.silog_loss(depth, depth, eps=1e-3) == 0


def test_forward_mode_of_a_batch_of_tangents():
    """Forward mode works for a batch of tangents, where sum() of 0-dim duals runs out of memory in torch 2.13."""
    x, y = depths(4, 5, dtype=torch.float64), depths(4, 5, dtype=torch.float64, seed=1)
    jacobian = torch.autograd.functional.jacobian
    forward = jacobian(lambda x: safeops.silog_loss(x, y), x, vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(forward, jacobian(lambda x: safeops.silog_loss(x, y), x))

"""Gradients that are in fp32's range are right, though the upstream gradient, a divisor, weights or operands are at the
ends of that range."""

import pytest
import torch
from safeops.kernels.losses.region_sums_backward import region_sums_backward
from safeops.kernels.reductions.masked_sum import masked_sum_backward

from tests.kernels.interpreted.truth import F32, F64, launchers

EXTREMES = [(1e38, 1e-20, 1e20), (1e38, 1e-30, 1e30), (1e-30, 1e10, 1e-30), (1e-38, 1e38, 1.0), (1e38, 1e-30, 1e45)]


def close(got, want):
    torch.testing.assert_close(got, want.float(), rtol=1e-6, atol=1e-44)


@pytest.mark.parametrize("size, upstream, divisor", EXTREMES)
@pytest.mark.parametrize("weight", [None, 1e-6, 1e6])
def test_of_losses(size, upstream, divisor, weight):
    """A loss's gradient is right though upstream / divisor would be subnormal, 0 or inf in fp32: the derivatives, as
    large as the operands, bring it back into range."""
    x, y, z = torch.linspace(-1, 1, 40) * size, torch.zeros(40), torch.ones(40)
    w = None if weight is None else torch.full((40,), weight)
    c = torch.tensor(upstream).double() / divisor * (1.0 if w is None else w.double())
    grad, by = torch.tensor(upstream).expand(40), torch.tensor(divisor, dtype=F64)
    dx, dy = launchers("mse_loss")[1](grad, by, x, y, None, w, True, True, F32, F32)
    close(dx, 2 * x.double() * c)
    assert torch.equal(dy, -dx)
    slopes = launchers("margin_ranking_loss")[1](grad, by, x, y, z, None, w, 3 * size, True, True, True, F32, F32, F32)
    for got, slope in zip(slopes, (-z, z, y - x)):
        close(got, slope.double() * c)


@pytest.mark.parametrize("weight, divisor", [(1e30, 4e31), (1e38, 4e39), (1e-38, 4e-37)])
def test_of_weighted_means(weight, divisor):
    """A weighted mean's gradient is right though the sum of weights by which it divides overflows fp32 or is close to
    0."""
    weights = torch.linspace(0.5, 1.5, 40) * weight
    for upstream in (1e-12, 1e12):
        grad, by = torch.tensor(upstream), torch.tensor(divisor, dtype=F64)
        dx = masked_sum_backward(grad, (40,), F32, by, None, weights)
        close(dx, weights.double() * grad.double() / by)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("exponent", [-200, -150, -100, 0, 100])
def test_of_regions(exponent, squared):
    """Gradients of regions are right where the gradients of the sums are at one end of the range and the operands at
    the other end."""
    size = 2.0 ** min(-exponent, 127)
    x, t = (torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(i)) * size for i in (1, 2))
    grad = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(3), dtype=F64) * 2.0**exponent
    both, marginal, marginal_target, _ = grad.unsqueeze(-1)
    if not squared:
        marginal, marginal_target = marginal * size, marginal_target * size
        grad[1:3] *= size
    dx, dt = region_sums_backward(grad, x, t, squared=squared, need_target=True)
    for got, other, factor, p in ((dx, t, marginal, x), (dt, x, marginal_target, t)):
        terms = both * other.double(), factor * 2 * p.double() if squared else factor.expand(p.shape)
        error = (got - sum(terms)).abs()
        assert (error <= 1e-6 * (terms[0].abs() + terms[1].abs()) + 1e-44).all()

"""Losses that are functions of a row's -log p: p = 0 and p = 1, digits near p = 1, use of cross_entropy's kernels."""

import math

import pytest
import torch

import safeops
from safeops.core.op import registry
from safeops.ops.classification._nll_function import NLLFunction
from tests.contract.common import DEVICE, each_route, names, on, t
from tests.ops import RECORDS
from tests.test_routes import dispatched

each_loss = pytest.mark.parametrize("name", names(NLLFunction))
TARGET = torch.zeros(1, dtype=torch.int64, device=DEVICE)
INF = math.inf


@each_loss
@each_route
@pytest.mark.parametrize("row", [(200.0, 0.0), (0.0, -INF), (INF, 0.0)])
def test_a_certain_row_has_gradient_0(route, name, row):
    x = t(*row).unsqueeze(0).requires_grad_()
    loss = on(route, name)(x, TARGET)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert loss.isfinite() and not first.any() and not second.any()


@each_loss
@each_route
def test_an_impossible_class_gives_no_nan_and_nan_shows(route, name):
    x = t(-INF, 0.0).unsqueeze(0).requires_grad_()
    loss = on(route, name)(x, TARGET)
    assert not loss.isnan() and not torch.autograd.grad(loss, x)[0].isnan().any()
    assert on(route, name)(t(math.nan, 0.0).unsqueeze(0), TARGET).isnan()


@each_loss
def test_the_function_keeps_the_digits_of_the_loss(name):
    """1 - p must be computed as -expm1(log p): p = 1 - 1e-8 rounds to 1 in fp32, and 1 - p to 0."""
    op = registry[name]
    numbers = [RECORDS[name].call[parameter.name] for parameter in op.parameters]
    nll = t(1e-8, 1e-4, 0.5, 20.0, 1e4).float().requires_grad_()
    wide = nll.detach().double().requires_grad_()
    ours, want = (op.value(x, *numbers) for x in (nll, wide))
    torch.testing.assert_close(ours.double(), want, rtol=1e-6, atol=0)
    (got,), (slope,) = (torch.autograd.grad(y.sum(), x) for y, x in ((ours, nll), (want, wide)))
    torch.testing.assert_close(got.double(), slope, rtol=1e-6, atol=0)


@each_loss
def test_one_read_of_the_logits_in_each_direction(name):
    x = torch.randn(9, 6, device=DEVICE, requires_grad=True)
    loss, forward = dispatched(lambda: getattr(safeops, name)(x, TARGET.expand(9)))
    _, backward = dispatched(lambda: torch.autograd.grad(loss, x))
    ops = [op for op in (*forward, *backward) if "cross_entropy" in op]
    assert ops == ["safeops::_cross_entropy", "safeops::_cross_entropy_backward"]

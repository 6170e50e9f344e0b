"""linear_cross_entropy with class probabilities or several classes a row: torch's values, with a mask."""

import math

import pytest
import torch
import torch.nn.functional as F

import safeops
from tests.contract.common import DEVICE

ROWS, WIDTH, CLASSES, PLACES = 6, 5, 4, 3


def layer(*outputs, dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    make = [torch.randn(*shape, WIDTH, generator=g) for shape in ((ROWS,), (CLASSES, *outputs))]
    bias = torch.randn(CLASSES, *outputs, generator=g)
    return [x.to(DEVICE, dtype).requires_grad_() for x in (*make, bias)]


def reference(x, weight, bias, target, **options):
    """Computes the loss of a linear layer from all its logits, in fp64."""
    logits = torch.einsum("nd,c...d->nc...", x.double(), weight.double()) + bias.double()
    return F.cross_entropy(logits, target.double() if target.is_floating_point() else target, **options)


def targets(kind):
    g = torch.Generator().manual_seed(2)
    if kind == "probabilities":
        return (), torch.rand(ROWS, CLASSES, generator=g).softmax(-1).to(DEVICE)
    if kind == "several":
        return (PLACES,), torch.randint(0, CLASSES, (ROWS, PLACES), generator=g).to(DEVICE)
    return (PLACES,), torch.rand(ROWS, CLASSES, PLACES, generator=g).softmax(1).to(DEVICE)


@pytest.mark.parametrize("kind", ["probabilities", "several", "several probabilities"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_logits_of_half_are_made_in_fp32(kind, dtype):
    outputs, target = targets(kind)
    operands = layer(*outputs, dtype=dtype)
    x, weight, bias = operands
    loss = safeops.linear_cross_entropy(x, weight, target, linear_bias=bias)
    want = reference(x, weight, bias, target)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    for got, grad in zip(torch.autograd.grad(loss, operands), torch.autograd.grad(want, operands)):
        torch.testing.assert_close(got, grad.to(dtype))


@pytest.mark.parametrize("way", ["mask", "ignore_index"])
@pytest.mark.parametrize("kind", ["probabilities", "several"])
def test_a_row_that_is_not_kept_reaches_no_gradient(kind, way):
    if (kind, way) == ("probabilities", "ignore_index"):
        with pytest.raises(ValueError, match="^linear_cross_entropy: ignore_index 1 is for class indices"):
            safeops.linear_cross_entropy(*layer()[:2], targets(kind)[1], ignore_index=1)
        return
    outputs, target = targets(kind)
    x, weight, bias = layer(*outputs)
    keep = torch.arange(ROWS, device=DEVICE) % 3 != 1
    dirty = torch.where(keep.unsqueeze(-1), x.detach(), math.nan).requires_grad_()
    whole = keep.reshape(-1, *[1] * len(outputs)).expand(ROWS, *outputs)
    if way == "mask":
        loss = safeops.linear_cross_entropy(dirty, weight, target, linear_bias=bias, mask=whole)
    else:
        loss = safeops.linear_cross_entropy(dirty, weight, torch.where(whole, target, -100), linear_bias=bias)
    want = reference(x[keep], weight, bias, target[keep])
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-6)
    got = torch.autograd.grad(loss, (dirty, weight, bias))
    grads = torch.autograd.grad(want, (x, weight, bias))
    torch.testing.assert_close(got, grads)
    assert not got[0][~keep].any()
    assert safeops.linear_cross_entropy(dirty, weight, target, linear_bias=bias).isnan()

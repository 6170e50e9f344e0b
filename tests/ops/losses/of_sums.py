"""Computes region losses from their sums, by any device's kernels, and by the definition: values and both gradients."""

from itertools import product

import torch

from safeops.core.op import registry

NUMBERS = {"dice_loss": (1e-5, 0.5), "tversky_loss": (0.0, 0.25, 0.25, 2.0)}
SIZES = [(1, 1), (16, 8), (3, 5), (150, 3), (2, 130)]
WEIGHTS = {"none": None, "all": torch.float32, "some": torch.float64, "half": torch.bfloat16}


def sums_of(images, classes):
    """Returns random sums of regions: some without a pixel, some with prediction and target 0, some with a negative
    prediction."""
    torch.manual_seed(images)
    p, t = torch.rand(2, images, classes, dtype=torch.float64) * 100
    sums = torch.stack([p * torch.rand_like(p), p, t, torch.full_like(p, 100)])
    kind = torch.randint(9, p.shape)
    sums[:, kind == 0] = 0
    sums[:3, kind == 1] = 0
    sums[:2, kind == 2] *= -3
    return sums


def options():
    for name, weight, reduction, batch in product(NUMBERS, WEIGHTS, (0, 1, 2), (False, True)):
        for divisor in (None, 3.5, 0.0, torch.tensor(7), torch.tensor(0.0))[: None if reduction == 1 else 1]:
            yield name, weight, reduction, batch, divisor


def both(kernels, name, sums, weight, divisor, reduction, batch, empty_nan, dtype, grad):
    """Returns [loss, gradient to sums, gradient to weight] twice: of the raw ops `kernels`, (forward, backward), and of
    the definition."""
    numbers = NUMBERS[name]
    by = (divisor, None) if isinstance(divisor, torch.Tensor) else (None, divisor)
    arguments = weight, *by, reduction, empty_nan, batch
    leaves = [x.clone().requires_grad_() for x in (sums, weight) if x is not None]
    operands = leaves if weight is not None else (*leaves, None)
    loss = registry[name].of_sums.definition(*operands, *by, reduction, empty_nan, batch, dtype, *numbers)
    grad = torch.randn(loss.shape, dtype=dtype) if grad is None else torch.full(loss.shape, grad, dtype=dtype)
    expected = [loss.detach(), *torch.autograd.grad(loss, leaves, grad)]
    forward, backward = kernels
    got = [forward(sums, *arguments, dtype, *numbers)]
    grads = backward(grad, sums, *arguments, *(*numbers, None, None)[:4], True, weight is not None)
    return got + list(grads[: 1 + (weight is not None)]), expected


def check(pairs, dtype):
    got, expected = pairs
    assert len(got) == len(expected)
    for i, (x, y) in enumerate(zip(got, expected)):
        assert x.shape == y.shape and x.dtype == y.dtype
        narrow = x.dtype if i != 1 else dtype if dtype == torch.float64 else torch.float64
        room = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[narrow]
        scale = y.double().abs().nan_to_num(0).max().item() if y.numel() else 0
        torch.testing.assert_close(x, y, rtol=room, atol=room * scale, equal_nan=True)


def against_the_definition(kernels, name, weight, reduction, batch, divisor):
    for size in SIZES if weight == "some" and divisor is None else SIZES[1:2]:
        sums, w = sums_of(*size), None
        if weight != "none":
            w = torch.rand(size[1] * 2, dtype=WEIGHTS[weight])[::2]
            w[::3] = 0 if weight == "some" else 0.5
        for dtype, empty_nan in ((torch.float32, False), (torch.float64, True)):
            check(both(kernels, name, sums, w, divisor, reduction, batch, empty_nan, dtype, None), dtype)


def nothing_kept(kernels, name, reduction):
    """Asserts that with nothing kept the gradients are exactly 0, also where `empty_nan` makes the losses NaN."""
    for batch, weight, size in product((False, True), (None, torch.ones(3)), ((2, 3), (0, 3))):
        sums = torch.zeros(4, *size, dtype=torch.float64)
        for empty_nan in (False, True):
            pairs = both(kernels, name, sums, weight, None, reduction, batch, empty_nan, torch.float32, 1.0)
            check(pairs, torch.float32)
            assert all((x == 0).all() for x in pairs[0][1:])


def stride_0(kernels):
    sums = sums_of(4, 3)
    arguments = None, None, None, 0, False, False, *NUMBERS["dice_loss"], None, None, True, False
    one = torch.ones((), dtype=torch.float32)
    got = kernels[1](one.expand(4, 3), sums, *arguments)[0]
    assert torch.equal(got, kernels[1](torch.ones(4, 3), sums, *arguments)[0])

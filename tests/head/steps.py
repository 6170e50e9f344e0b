"""Losses by head_loss and by all logits, in steps whose rows have one upstream gradient or each its own."""

import contextlib

import torch

import safeops

D, C, ROWS = 8, 24, 40
MASK = torch.arange(ROWS) % 3 > 0
TARGET = torch.arange(ROWS) * 7 % C
UPSTREAM = torch.linspace(0.5, 1.5, ROWS)
EPS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def mean(losses, head, hidden):
    return losses.cross_entropy(head, hidden, TARGET, mask=MASK)


def rows(losses, head, hidden):
    return (losses.cross_entropy(head, hidden, TARGET, reduction="none", label_smoothing=0.1) * UPSTREAM).mean()


def log_probs(losses, head, hidden):
    results = losses.token_log_probs(head, hidden, TARGET, mask=MASK)
    return sum((x * UPSTREAM).mean() * factor for x, factor in zip(results, (1.0, -0.3, 0.1)))


def divergence(losses, head, hidden):
    return losses.kl_div(head, hidden, hidden.detach().flip(0).repeat(1, C // D), temperature=2.0)


STEPS = {step.__name__: step for step in (mean, rows, log_probs, divergence)}


class InChunks:
    """Losses by head_loss."""

    def __getattr__(self, loss):
        return lambda head, hidden, target, **options: safeops.head_loss(head, hidden, target, loss=loss, **options)


class Whole:
    """Losses of all logits."""

    def __getattr__(self, loss):
        function = getattr(safeops, {"kl_div": "kl_div_with_logits"}.get(loss, loss))
        return lambda head, hidden, target, **options: function(head(hidden), target, **options)


def gradients(losses, step, head, hidden, scale=1.0, region=contextlib.nullcontext):
    """[loss, gradient of hidden, gradients of the parameters]."""
    head.zero_grad()
    hidden = hidden.detach().requires_grad_()
    with region():
        loss = step(losses, head, hidden)
    (loss * scale).backward()
    return [loss.detach(), hidden.grad, *(p.grad for p in head.parameters() if p.requires_grad)]


def close(results, expected, tolerance):
    for x, y in zip(results, expected, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(float(y.detach().abs().max()), 1e-30))


def near(results, expected, truth, eps):
    """Results must be as near the truth as the expected ones, to the rounding of their dtype."""
    for x, y, z in zip(results, expected, truth, strict=True):
        errors = [float((t.double() - z).abs().max()) for t in (x, y)]
        assert x.dtype == y.dtype and errors[0] <= errors[1] + eps * float(z.abs().max()), errors

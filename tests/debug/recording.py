"""Helpers for the tests of the recorder."""

import torch

BAD = 3  # the step whose batch makes the log of 0


class Positive(torch.nn.Module):
    """log of the absolute output: a row of zeros makes -inf."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner or torch.nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return self.inner(x).abs().log()  # HERE


def batches(count=5, bad=BAD, rows=8):
    """Batches of ones to sixteens; that of step `bad` has a row of zeros."""
    generator = torch.Generator().manual_seed(1)
    result = [torch.rand(rows, 4, generator=generator) + 0.5 for _ in range(count)]
    if bad:
        result[bad - 1][2] = 0
    return result


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

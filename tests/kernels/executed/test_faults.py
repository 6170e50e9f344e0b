"""Calls that Triton once compiled wrongly though the kernels' own tests passed: blocks that counted beyond the
counters, a pass that ran the code of another, a gradient that was read beyond its end."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import safeops
from tests.kernels.executed.handwritten import needs_compiler
from tests.kernels.executed.launching import executed, on_launchers
from tests.kernels.executed.subjects import BF16, F32, F64
from tests.kernels.executed.test_ops import version  # noqa: F401  (a fixture)

pytestmark = [needs_compiler, pytest.mark.slow]


def first(x):
    return torch.zeros(x.shape[0], dtype=torch.int64)


MEANS = {
    "cross_entropy": (lambda x: safeops.cross_entropy(x, first(x)), lambda x: F.cross_entropy(x, first(x))),
    "multi_margin_loss": (lambda x: safeops.multi_margin_loss(x, first(x)), lambda x: F.multi_margin_loss(x, first(x))),
    "triplet_margin_loss": (
        lambda x: safeops.triplet_margin_loss(x, x.flip(1), x.roll(1, 1)),
        lambda x: F.triplet_margin_loss(x, x.flip(1), x.roll(1, 1)),
    ),
}


# Long rows are read in several pieces, and at most 1,019 such rows have counters; 70,000 short rows exceed any table.
@pytest.mark.parametrize(
    "name, rows, columns, dtype",
    [
        ("cross_entropy", 1100, 25_000, BF16), ("multi_margin_loss", 1100, 20_000, F32),
        ("cross_entropy", 70_000, 8, F32),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (
            ("cross_entropy", 1021, 25_000, BF16), ("triplet_margin_loss", 1100, 20_000, F32),
            ("multi_margin_loss", 70_000, 8, F32),
        )),
    ],
)  # fmt: skip
def test_more_rows_than_counters(name, rows, columns, dtype):
    """With more rows than counters every block still runs exactly once: all rows are copies of one, so the mean must be
    that row's loss."""
    ours, theirs = MEANS[name]
    row = torch.randn(1, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    with executed(orders=1), on_launchers():
        result = ours(row.repeat(rows, 1))
    torch.testing.assert_close(result.double(), theirs(row.double()), rtol=1e-5, atol=1e-6)


SOFTMAXES = {
    "masked_softmax": (lambda x: safeops.masked_softmax(x, None, -1), lambda x: x.softmax(-1)),
    "masked_log_softmax": (lambda x: safeops.masked_log_softmax(x, None, -1), lambda x: x.log_softmax(-1)),
    "normalize": (lambda x: safeops.normalize(x, dim=-1), lambda x: F.normalize(x, dim=-1)),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_odd_rows_in_parts(name, version):  # noqa: F811
    """Nothing beyond the gradient's end is read where the logits are views without the last or first element of each
    row, while the gradient is dense."""
    ours, theirs = SOFTMAXES[name]
    whole = 3 * torch.randn(2, 9002, generator=torch.Generator().manual_seed(0))
    for cut in (slice(None, -1), slice(1, None)):
        x = whole.to(BF16)[:, cut].requires_grad_()
        grad = torch.randn(2, 9001, generator=torch.Generator().manual_seed(1)).to(BF16)
        with executed(version=version), on_launchers():
            result = ours(x)
            (slope,) = torch.autograd.grad(result, x, grad)
        wide = x.detach().double().requires_grad_()
        truth = theirs(wide)
        (true_slope,) = torch.autograd.grad(truth, wide, grad.double())
        torch.testing.assert_close(result.detach().double(), truth.detach(), rtol=8e-3, atol=1e-6)
        torch.testing.assert_close(slope.double(), true_slope, rtol=8e-3, atol=8e-3 * true_slope.abs().max().item())


@pytest.mark.parametrize("classes", [2049, 4096])
def test_divergences_of_many_classes_in_fp64(classes):
    x, y = (torch.randn(2, classes, dtype=F64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    x.requires_grad_()
    with executed(), on_launchers():  # executed() refuses more registers than a block can have
        result = safeops.js_div_with_logits(x, y)
        (slope,) = torch.autograd.grad(result, x)
    p, q = (t.log_softmax(-1) for t in (x, y))
    mean = torch.logaddexp(p, q) - torch.tensor(2.0, dtype=F64).log()
    truth = ((p.exp() * (p - mean) + q.exp() * (q - mean)).sum(-1) / 2).mean()
    (true_slope,) = torch.autograd.grad(truth, x)
    torch.testing.assert_close(result, truth)
    torch.testing.assert_close(slope, true_slope)

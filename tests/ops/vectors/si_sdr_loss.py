"""si_sdr_loss: rows are signals, and the mask is per sample."""

import math

import torch

from tests.ops.operands import plain
from tests.ops.row_loss import bad_calls, row_loss, vectors

WORST = -20 * math.log10(torch.finfo(torch.float64).eps)


def centered(x, keep):
    return torch.where(keep, x - x.sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1), 0)


def si_sdr(x, s, zero_mean=False, keep=None):
    """Returns the paper's loss; x and s must be 0 where not kept. <x, s> = 0, as for silence, gives the loss WORST."""
    if zero_mean:
        x, s = centered(x, keep), centered(s, keep)
    product, square = (x * s).sum(-1, keepdim=True), s.square().sum(-1, keepdim=True)
    none = product == 0
    projection = torch.where(none, 1, product / torch.where(none, 1, square) * s)
    error = torch.where(none, 0, projection - x).square().sum(-1)
    perfect = (error == 0) & ~none[..., 0]
    ratio = torch.where(error == 0, 1, projection.square().sum(-1) / torch.where(error == 0, 1, error))
    return torch.where(none[..., 0], WORST, torch.where(perfect, -WORST, -10 * ratio.log10()))


def _sizes(x, s, zero_mean):
    """Sizes of the terms. With c and d the cosine and sine of the angle between the signals, roundings of the unit
    vectors have size 1 / c relative to c, and 1 / d relative to d. A centered signal has the roundings of the signal
    before."""
    every, lengths = torch.ones_like(x, dtype=torch.bool), []
    for y in (x, s):
        y, before = centered(y, every), y.norm(dim=-1, keepdim=True)
        length = y.norm(dim=-1, keepdim=True)
        lengths.append((torch.where(length == 0, 1, length), torch.where(length == 0, 1, before)))
    (nx, bx), (ns, bs) = lengths
    c = (centered(x, every) / nx * centered(s, every) / ns).sum(-1, keepdim=True).abs().clamp(1e-6, 1 - 1e-12)
    worst = 20 * (1 / (1 - c * c) + 1 / (c * c)) * (bx / nx + bs / ns)
    return si_sdr(x, s, zero_mean, every).abs() + worst[..., 0], (worst / nx, worst / ns)


def _eager(x, s, reduction, zero_mean):
    return si_sdr(x, s, zero_mean, torch.ones_like(x, dtype=torch.bool))


NAME = "si_sdr_loss"
row_loss(
    NAME,
    si_sdr,
    _sizes,
    _eager,
    vectors(2),
    {"input": plain(), "target": plain(1), "mask": torch.arange(5)[:, None] != 2},
    {"zero_mean": True},
    bad_calls(NAME, ("input", "target"), (), {}, ("zero_mean",), width=4, by_element=True),
    by_element=True,
    skip={"routes": "few digits of a bad estimate's gradient: tests/contract/vectors/test_si_sdr.py judges each route"},
)

"""Losses of the difference of input and target."""

import math

import torch
import torch.nn.functional as F

from tests.ops.losses.pointwise import pointwise
from tests.ops.truth import absolute


def _knee(d, at):
    """Returns d^2 / 2 where |d| < at, else at (|d| - at / 2). Each branch gets only its own elements, so that the other
    branch's gradient cannot be NaN."""
    a = absolute(d)
    inner = a < at
    quadratic = torch.where(inner, a, 0).square() / 2
    return torch.where(inner, quadratic, at * (torch.where(inner, 0, a) - at / 2))


def _smooth_l1(x, y, beta=1.0):
    return absolute(x - y) if beta == 0 else _knee(x - y, beta) / beta


def _charbonnier(x, y, eps=1e-3):
    d = x - y
    return torch.where(d.isinf(), absolute(d), (torch.where(d.isinf(), 0, d).square() + eps * eps).sqrt())


def _quantile(x, y, quantile=0.5):
    over, under = absolute(torch.where(x > y, x - y, 0)), absolute(torch.where(x > y, 0, x - y))
    return sum(torch.where(d.isinf() & (q == 0), 0, d) * q for d, q in ((over, 1 - quantile), (under, quantile)))


def _torchmetrics_quantile(x, y, reduction, quantile=0.5):
    d = y - x
    return torch.where(d >= 0, quantile * d, (quantile - 1) * d)


def _log_cosh(x, y):
    d = x - y
    near = d.abs() < 20
    s = torch.where(near, d, 0).sinh()
    return torch.where(near, torch.log1p(s * s) / 2, absolute(d) - math.log(2))


pointwise("mse_loss", lambda x, y: (x - y) * (x - y), F.mse_loss)
pointwise("l1_loss", lambda x, y: absolute(x - y), F.l1_loss)
pointwise("smooth_l1_loss", _smooth_l1, F.smooth_l1_loss)
pointwise("huber_loss", lambda x, y, delta=1.0: _knee(x - y, delta), F.huber_loss)
pointwise("charbonnier_loss", _charbonnier, lambda x, y, reduction, eps=1e-3: ((x - y) ** 2 + eps**2).sqrt())
pointwise("quantile_loss", _quantile, _torchmetrics_quantile)
pointwise("log_cosh_loss", _log_cosh, lambda x, y, reduction: (x - y).cosh().log())

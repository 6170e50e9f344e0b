"""Losses of a sign and a margin."""

import torch
import torch.nn.functional as F

from tests.ops.losses.pointwise import pointwise


def _soft_margin(x, y):
    far = y * x == torch.inf
    a = torch.where(far, 0, y) * torch.where(far, 0, x)
    return torch.where(far, 0, -F.logsigmoid(a))


def _soft_margin_sizes(x, y):
    """Sizes of the terms. e^(-y x) has a relative error of |y x| roundings. q is at least fp32's smallest normal
    number, as subnormal numbers lose digits."""
    a = (y * x).abs()
    q, loss = (-y * x).sigmoid().clamp(min=2.0**-126), _soft_margin(x, y)
    return loss + a * q, y.abs() * q * (1 + a), x.abs() * q * (1 + a)


def _hinge(x, y, margin=1.0):
    lack = margin - x
    shown = (y - y).detach() + torch.where(torch.zeros_like(y, dtype=torch.bool), y, 0)
    return torch.where(y == -1, 0, x) + torch.where((y == 1) | (lack <= 0), 0, lack) + shown


def _ranking(x1, x2, y, margin=0.0):
    flat = margin - y * (x1 - x2) <= 0
    return torch.where(flat, 0, margin - torch.where(flat, 0, y) * torch.where(flat, 0, x1 - x2))


def _ranking_sizes(x1, x2, y, margin=0.0):
    return abs(margin) + (y * (x1 - x2)).abs(), y.abs(), y.abs(), (x1 - x2).abs()


pointwise(
    "soft_margin_loss",
    _soft_margin,
    F.soft_margin_loss,
    sizes=_soft_margin_sizes,
    several_terms=True,
)
pointwise("hinge_embedding_loss", _hinge, F.hinge_embedding_loss)
pointwise("margin_ranking_loss", _ranking, F.margin_ranking_loss, sizes=_ranking_sizes)

"""Shared by the losses of pairs of numbers: a chosen answer and a rejected one."""

import torch

from safeops.core import check
from safeops.core.definitions import selected
from safeops.core.dtypes import filled
from safeops.core.symbolic import as_operand
from safeops.ops.losses.binary_cross_entropy_with_logits import binary_cross_entropy_with_logits


def validate_margin(name, margin):
    """Check a margin's type and dtype; `margin_for` checks its shape."""
    if not isinstance(margin, torch.Tensor):
        return check.number(name, "margin", margin)
    check.floating(name, "margin", margin, numbers=True)


def margin_for(name, margin, like_name, like, keep, compute):
    """Validate a margin beside the tensor `like`. A tensor is converted to the dtype `compute`, with 0 where `keep` is
    False; a CPU tensor without dims is moved to like's device."""
    validate_margin(name, margin)
    if not isinstance(margin, torch.Tensor):
        return as_operand(margin, like)
    check.broadcasts_to(name, "margin", margin, like_name, like)
    margin = margin.to(like.device) if margin.is_cpu and margin.dim() == 0 else margin
    check.same_device(name, like_name, like, margin=margin)
    return selected(margin.to(compute), keep)


def logistic(z, label_smoothing=0.0):
    """-(1 - s) log sigmoid(z) - s log sigmoid(-z), s the label_smoothing."""
    target = filled(z, (), 1 - as_operand(label_smoothing, z)).expand(z.shape)
    return binary_cross_entropy_with_logits(z, target, reduction="none")

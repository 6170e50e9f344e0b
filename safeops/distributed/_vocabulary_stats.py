"""The numbers from which the loss of a row is computed. If its classes are on several ranks, the ranks combine them."""

from typing import NamedTuple

import torch

from safeops.core import sums
from safeops.core.dtypes import compute_dtype
from safeops.ops.classification._logits import shaped
from safeops.ops.reductions.masked_logsumexp import masked_logsumexp

INF = float("inf")


def index_in(classes, class_index):
    """Returns (index, inside) in a part of `classes` classes. class_index (*rows): each row's class, relative to the
    part's first. index (*rows, 1): this index, or 0 if it is in another part. inside (*rows): True if in this part."""
    inside = (class_index >= 0) & (class_index < classes)
    return torch.where(inside, class_index, 0).unsqueeze(-1), inside


class Classes(NamedTuple):
    """The classes that exist. A class with a bias of -inf does not exist: its weight is 0."""

    weights: torch.Tensor  # (C,), fp64
    total_weight: torch.Tensor  # ()
    size: torch.Tensor  # (): how many exist


def existing_classes(count, linear_bias, weight, device):
    weights = torch.ones(count, dtype=torch.float64, device=device) if weight is None else weight.double()
    exists = torch.ones_like(weights, dtype=torch.bool) if linear_bias is None else linear_bias != float("-inf")
    weights = torch.where(exists, weights, 0)
    return Classes(weights, weights.sum(), exists.sum().double())


class RowStats(NamedTuple):
    """The numbers of each row from which its loss is computed: (rows,) each, in fp64."""

    others: torch.Tensor  # logsumexp of the logits of all classes except the row's class
    class_logit: torch.Tensor
    weighted_sum: torch.Tensor | int  # sum over the classes of weight * logit; 0 if it is not needed


def row_stats(chunks, class_index, weights, temperature, softcap):
    """The RowStats of all rows, from one pass over the chunks of classes. weights: of the classes; None: weighted_sum
    is not needed."""
    class_logit, weighted_sum = torch.zeros_like(class_index, dtype=torch.float64), 0
    others, rows = torch.full_like(class_logit, -INF), torch.arange(len(class_index), device=class_index.device)
    for part, logits in chunks:
        logits = shaped(logits, temperature, softcap, compute_dtype(logits.dtype))
        if weights is not None:
            w = weights[part]
            weighted_sum = weighted_sum + sums.total(logits, w != 0, dim=-1, weight=w, dtype=torch.float64)
        index, inside = index_in(logits.shape[1], class_index - part.start)
        index = rows, index.squeeze(1)  # (aten's scatter_ would copy half logits)
        logit = logits[index]
        class_logit = torch.where(inside, logit, class_logit)
        logits[index] = logit.masked_fill(inside, -INF)
        of_part = masked_logsumexp(logits, dim=-1, dtype=torch.float64)
        logits[index] = logit
        others = torch.logaddexp(others, of_part)
    return RowStats(others, class_logit, weighted_sum)


def losses(stats, keep, weights, classes, label_smoothing, z_loss):
    """Returns (loss, logsumexp) of each row, in fp64. A +inf logit gives NaN, unless it is the row's class and the only
    +inf: then its probability is 1."""
    others, class_logit, weighted_sum = stats
    log_sum = torch.logaddexp(others, class_logit)
    certain = (class_logit == INF) & (others < INF) & (not label_smoothing and not z_loss)
    log_sum = torch.where((log_sum == INF) & ~certain, float("nan"), log_sum)
    loss = torch.where(certain, 0, log_sum - class_logit)
    loss = loss if weights is None else weights * loss
    if label_smoothing:
        uniform = label_smoothing / classes.size
        loss = (1 - label_smoothing) * loss + uniform * (classes.total_weight * log_sum - weighted_sum)
    return torch.where(keep, loss + z_loss * log_sum.square() if z_loss else loss, 0), log_sum

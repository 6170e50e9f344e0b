"""The numbers of a row whose classes are on several ranks, of which its loss is made; the ranks add them up."""

from typing import NamedTuple

import torch

from safeops.core import sums
from safeops.core.dtypes import compute_dtype
from safeops.ops.classification._logits import shaped
from safeops.ops.reductions.masked_logsumexp import masked_logsumexp

INF = float("inf")


def index_in(classes, place):
    """(index of each row's class in a part of so many, else 0; whether it is there). place: counted from its first."""
    inside = (place >= 0) & (place < classes)
    return torch.where(inside, place, 0).unsqueeze(-1), inside


class Classes(NamedTuple):
    """Those that exist: a class with a bias of -inf does not, and weighs 0."""

    weights: torch.Tensor  # (C,), fp64
    total_weight: torch.Tensor  # ()
    size: torch.Tensor  # (): how many there are


def existing_classes(count, linear_bias, weight, device):
    weights = torch.ones(count, dtype=torch.float64, device=device) if weight is None else weight.double()
    exists = torch.ones_like(weights, dtype=torch.bool) if linear_bias is None else linear_bias != float("-inf")
    weights = torch.where(exists, weights, 0)
    return Classes(weights, weights.sum(), exists.sum().double())


class RowStats(NamedTuple):
    """The numbers of each row that its loss is made of, in fp64."""

    others: torch.Tensor  # logsumexp of the logits but that of the row's class
    class_logit: torch.Tensor
    weighted_sum: torch.Tensor | int  # of all logits, by the weights of the classes


def row_stats(chunks, place, weights, temperature, softcap):
    """The stats of all rows, from one pass over the chunks. weights: of the classes; None: no sum by them is needed."""
    class_logit, weighted_sum = torch.zeros_like(place, dtype=torch.float64), 0
    others, rows = torch.full_like(class_logit, -INF), torch.arange(len(place), device=place.device)
    for part, logits in chunks:
        logits = shaped(logits, temperature, softcap, compute_dtype(logits.dtype))
        if weights is not None:
            w = weights[part]
            weighted_sum = weighted_sum + sums.total(logits, w != 0, dim=-1, weight=w, dtype=torch.float64)
        index, inside = index_in(logits.shape[1], place - part.start)
        index = rows, index.squeeze(1)  # (aten's scatter_ would copy half logits)
        logit = logits[index]
        class_logit = torch.where(inside, logit, class_logit)
        logits[index] = logit.masked_fill(inside, -INF)
        of_part = masked_logsumexp(logits, dim=-1, dtype=torch.float64)
        logits[index] = logit
        others = torch.logaddexp(others, of_part)
    return RowStats(others, class_logit, weighted_sum)


def losses(stats, keep, weights, classes, label_smoothing, z_loss):
    """(loss, logsumexp) of each row, in fp64. A logit of +inf is no distribution, but where it is that of the row's
    class, and that one alone: then it has all the probability."""
    others, class_logit, weighted_sum = stats
    log_sum = torch.logaddexp(others, class_logit)
    certain = (class_logit == INF) & (others < INF) & (not label_smoothing and not z_loss)
    log_sum = torch.where((log_sum == INF) & ~certain, float("nan"), log_sum)
    loss = torch.where(certain, 0, log_sum - class_logit)
    loss = loss if weights is None else weights * loss
    if label_smoothing:
        even = label_smoothing / classes.size
        loss = (1 - label_smoothing) * loss + even * (classes.total_weight * log_sum - weighted_sum)
    return torch.where(keep, loss + z_loss * log_sum.square() if z_loss else loss, 0), log_sum

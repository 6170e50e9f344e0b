"""linear_cross_entropy in chunks of the classes, in plain torch for any device.

Of classes, not of rows as in `_linear_rows`: each gradient of the weight is then one product over all rows, summed in
fp32 inside it and rounded once, with no fp32 buffer as large as the weight; and "none" is no other case, for each row's
own upstream gradient is in its slopes. The price is a fourth product: the backward computes the logits again.
"""

from typing import NamedTuple

import torch

from safeops.core import sums
from safeops.core.dtypes import compute_dtype, to_one
from safeops.ops.reductions.masked_logsumexp import masked_logsumexp
from safeops.ops.rows._classification import refuse_missing_class, rows_of
from safeops.ops.rows._matmul import without_autocast
from safeops.ops.rows.cross_entropy import _cross_entropy

NAME = "linear_cross_entropy"
CHUNK = 2**23  # logits at a time
INF = float("inf")
AS_THEY_ARE = 1.0, 0.0  # logits: the temperature, and no softcap
NO_CLASS = torch.iinfo(torch.int64).min  # what no target is, less the first class of a chunk


def chunks_of(x, linear_weight, linear_bias):
    """(slice of the classes, their logits): a buffer of its own each, in the operands' dtype as a linear layer's."""
    size = max(1, CHUNK // max(1, len(x)))
    for first in range(0, len(linear_weight), size):
        part = slice(first, first + size)
        yield part, logits_of(x, linear_weight[part], None if linear_bias is None else linear_bias[part])


def logits_of(x, linear_weight, linear_bias, out=None):
    w = linear_weight.mT
    return torch.mm(x, w, out=out) if linear_bias is None else torch.addmm(linear_bias, x, w, out=out)


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


def forward(input, linear_weight, target, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss):
    # A compiled call could not look before.
    refuse_missing_class(NAME, target, mask, ignore_index, len(linear_weight), "linear_weight", linear_weight.shape)
    dtype = compute_dtype(input.dtype)
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    place, keep, weights = rows_of(len(linear_weight), target, weight, mask, ignore_index, compute)
    x = torch.where(keep.unsqueeze(1), input, 0)
    classes = existing_classes(len(linear_weight), linear_bias, weight, x.device)
    with without_autocast(x):
        stats = row_stats(chunks_of(x, linear_weight, linear_bias), place, classes.weights if label_smoothing else None)
    loss, log_sum = losses(stats, keep, weights, classes, label_smoothing, z_loss)
    loss = loss.to(dtype)
    return loss, keep, loss.new_empty(0) if weights is None else weights, log_sum


class RowStats(NamedTuple):
    """The numbers of each row that its loss is made of, in fp64."""

    others: torch.Tensor  # logsumexp of the logits but that of the row's class
    class_logit: torch.Tensor
    weighted_sum: torch.Tensor | int  # of all logits, by the weights of the classes


def row_stats(chunks, place, weights):
    """The stats of all rows, from one pass over the chunks. weights: of the classes; None: no sum by them is needed."""
    class_logit, weighted_sum = torch.zeros_like(place, dtype=torch.float64), 0
    others, rows = torch.full_like(class_logit, -INF), torch.arange(len(place), device=place.device)
    for part, logits in chunks:
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


def backward(
    grad, input, linear_weight, target, log_sum, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss,
    *needs,
):  # fmt: skip
    place, keep, weights = rows_of(len(linear_weight), target, weight, mask, ignore_index, torch.float64)
    return gradients(
        grad, input, linear_weight, linear_bias, place, keep, weights, log_sum,
        existing_classes(len(linear_weight), linear_bias, weight, input.device),  # (nobody else holds them)
        label_smoothing, z_loss, needs,
    )  # fmt: skip


def gradients(
    grad, input, linear_weight, linear_bias, place, keep, weights, log_sum, classes, label_smoothing, z_loss, needs,
    finish=lambda d_input: d_input,
):  # fmt: skip
    """Those that are needed, the others empty. finish: of the input's gradient in fp32 once all chunks are in it, with
    the weight's last product still to be made. place: counted from the first class of linear_weight."""
    compute = compute_dtype(input.dtype, grad.dtype)
    x = torch.where(keep.unsqueeze(1), input, 0)
    g = torch.where(keep, grad, 0).double()
    scale = scale_of(x, linear_weight, g, log_sum, weights, classes, z_loss)
    g = g if scale is None else g * scale
    by = slopes_by(x, weights, label_smoothing, z_loss)
    of_chunk = by(g, keep, log_sum, weights, classes, label_smoothing, z_loss, compute)
    del classes  # a number for each class, which not all slopes keep

    def slopes(logits, part):
        return of_chunk(logits, place - part.start, part)

    return products(x, linear_weight, linear_bias, keep, slopes, scale, compute, needs, finish)


def products(x, linear_weight, linear_bias, keep, slopes, scale, compute, needs, finish=lambda d_input: d_input):
    """The gradients of the layer from the slopes to its logits, slopes(logits, part of the classes)."""
    need_input, need_weight, need_bias = needs
    d_input = x.new_zeros(x.shape if need_input else 0, dtype=compute)  # fp32 over the chunks
    d_weight = torch.empty_like(linear_weight if need_weight else x[:0, :0], memory_format=torch.contiguous_format)
    d_bias = x.new_empty(len(linear_weight) if need_bias else 0)

    def finish_rows(d_input):
        d_input.masked_fill_(~keep.unsqueeze(1), 0)  # (of a row that does not exist: 0 times what is not finite)
        return finish(d_input if scale is None else d_input.div_(scale))

    if need_input and not len(linear_weight):
        d_input = finish_rows(d_input)
    with without_autocast(x):
        for part, logits in chunks_of(x, linear_weight, linear_bias):
            slope = slopes(logits, part)
            if need_bias:
                d_bias[part] = sums.total(slope, dim=0)
            slope = slope.to(x.dtype)
            if need_input and compute == x.dtype:
                d_input.addmm_(slope, linear_weight[part])
            elif need_input:
                d_input += slope @ linear_weight[part]
            if need_input and part.stop >= len(linear_weight):
                d_input = finish_rows(d_input)
            if need_weight:
                torch.mm(slope.mT, x, out=d_weight[part])
            del logits, slope  # before the next are made
    if scale is not None:
        d_weight.div_(scale)
        d_bias.div_(scale)
    return d_input.to(x.dtype), d_weight, d_bias


# The slopes to the logits of a chunk: factor p - even w, less on_class at the row's class, p = exp(logit - log_sum).
# They are computed by the backward kernel of cross_entropy, or in torch.


def slopes_by(x, weights, label_smoothing, z_loss):
    """Which of the two. Class weights are a factor of the row for the kernel; but not of the smoothing, nor of the
    z-loss."""
    by_kernel = _cross_entropy.runs_on(x.device) and (weights is None or not (label_smoothing or z_loss))
    return _slopes_by_kernel if by_kernel else _slopes


def _slopes_by_kernel(g, keep, log_sum, weights, classes, label_smoothing, z_loss, compute):
    g = (g if weights is None else g * weights).to(compute)
    high = log_sum.to(compute).double()  # exact in the kernel's arithmetic
    numbers = [high, torch.where(high.isinf(), 0, log_sum - high)]
    if label_smoothing:
        numbers.append(label_smoothing / classes.size.expand(log_sum.shape))
    numbers, weight = torch.stack(numbers).to(compute), None
    need_input, need_target, partial = True, False, True  # partial: a row's class may be none of the chunk's

    def slopes(logits, place, part):
        d_logits, _ = _cross_entropy.backward(
            g, logits, place, numbers, weight, keep, NO_CLASS, label_smoothing, z_loss, *AS_THEY_ARE, need_input,
            need_target, partial,
        )  # fmt: skip
        return d_logits

    return slopes


def _slopes(g, keep, log_sum, weights, classes, label_smoothing, z_loss, compute):
    keep = keep & (log_sum != INF)  # (those of a row that is certain are 0)
    log_sum = torch.where(keep, log_sum, INF)  # p = 0
    on_class = (1 - label_smoothing) * (g if weights is None else g * weights)
    even = label_smoothing * g / classes.size
    factor = on_class + classes.total_weight * even + torch.where(keep, 2 * z_loss * log_sum * g, 0)
    even, class_weights = even.to(compute), classes.weights.to(compute)
    high = log_sum.to(compute)
    low = torch.where(log_sum.isinf(), 0, log_sum - high)  # what it loses there
    high, low, factor, on_class = (t.to(compute).unsqueeze(1) for t in (high, low, factor, on_class))

    def slopes(logits, place, part):
        slope = logits.to(compute).sub_(high).sub_(low).exp_().mul_(factor)
        if label_smoothing:
            slope.addr_(even, class_weights[part], alpha=-1)
        index, inside = index_in(logits.shape[1], place)
        slope.scatter_add_(1, index, torch.where(inside.unsqueeze(1), -on_class, 0))
        return slope.masked_fill_(~keep.unsqueeze(1), 0)  # (0 times a logit that is not finite)

    return slopes


def scale_of(x, linear_weight, g, log_sum, weights, classes, z_loss):
    """A power of two that brings the slopes to the logits, and the products made of them, to the upper end of fp16: of
    a mean over many rows they would vanish, of a scaled loss overflow. The gradients are divided by it again: one too
    large for fp16 becomes inf there. None for other dtypes. g: the upstream gradient of each row."""
    if x.dtype != torch.float16 or not x.numel() or not linear_weight.numel():
        return None
    weight = 1 if weights is None else torch.maximum(weights.abs(), classes.total_weight.abs() / classes.size)
    rows = (g * weight * (1 + 2 * z_loss * log_sum.abs() if z_loss else 1)).abs()
    low, high = torch.aminmax(linear_weight)
    largest = torch.maximum(-low, high).double()
    bound = torch.maximum(rows.sum() * x.abs().amax().double().clamp(min=1), 2 * rows.amax() * largest.clamp(min=1))
    return torch.where(bound.isfinite() & (bound > 0), to_one(bound) * 2.0**14, 1)

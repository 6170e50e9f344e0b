"""linear_cross_entropy in chunks of the classes, in plain torch for any device.

Of classes, not of rows as in `_linear_rows`: each gradient of the weight is then one product over all rows, summed in
fp32 inside it and rounded once, with no fp32 buffer as large as the weight; and "none" is no other case, for each row's
own upstream gradient is in its slopes. The price is a fourth product: the backward computes the logits again.
"""

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


def own_of(place, classes):
    """(where in a part of the classes each row's is, whether it is there); place: counted from the part's first."""
    inside = (place >= 0) & (place < classes)
    return torch.where(inside, place, 0).unsqueeze(-1), inside


def existing_of(classes, linear_bias, weight, device):
    """(weight of each class, 0 where its bias of -inf says that there is none; their sum; how many there are)."""
    every = torch.ones(classes, dtype=torch.float64, device=device) if weight is None else weight.double()
    exists = torch.ones_like(every, dtype=torch.bool) if linear_bias is None else linear_bias != float("-inf")
    every = torch.where(exists, every, 0)
    return every, every.sum(), exists.sum().double()


def forward(input, linear_weight, target, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss):
    # A compiled call could not look before.
    refuse_missing_class(NAME, target, mask, ignore_index, len(linear_weight), "linear_weight", linear_weight.shape)
    dtype = compute_dtype(input.dtype)
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    place, keep, weights = rows_of(len(linear_weight), target, weight, mask, ignore_index, compute)
    x = torch.where(keep.unsqueeze(1), input, 0)
    existing = existing_of(len(linear_weight), linear_bias, weight, x.device)
    with without_autocast(x):
        sums = sums_of(chunks_of(x, linear_weight, linear_bias), place, existing[0] if label_smoothing else None)
    loss, log_sum = losses(*sums, keep, weights, existing, label_smoothing, z_loss)
    loss = loss.to(dtype)
    return loss, keep, loss.new_empty(0) if weights is None else weights, log_sum


def sums_of(chunks, place, every):
    """(logsumexp of the others, target's logit, weighted sum of all logits) of each row, in fp64; every: the weights,
    None: not wanted."""
    target_logit, spread = torch.zeros_like(place, dtype=torch.float64), 0
    others, rows = torch.full_like(target_logit, -INF), torch.arange(len(place), device=place.device)
    for part, logits in chunks:
        if every is not None:
            w = every[part]
            spread = spread + sums.total(logits, w != 0, dim=-1, weight=w, dtype=torch.float64)
        at, inside = own_of(place - part.start, logits.shape[1])
        at = rows, at.squeeze(1)  # (aten's scatter_ would copy half logits)
        there = logits[at]
        target_logit = torch.where(inside, there, target_logit)
        logits[at] = there.masked_fill(inside, -INF)
        of_part = masked_logsumexp(logits, dim=-1, dtype=torch.float64)
        logits[at] = there
        others = torch.logaddexp(others, of_part)
    return others, target_logit, spread


def losses(others, target_logit, spread, keep, weights, existing, label_smoothing, z_loss):
    """(loss, logsumexp) of each row, in fp64. A logit of +inf is no distribution, but where it is the row's own, and
    that one alone: then it has all the probability."""
    _, all_weight, count = existing
    log_sum = torch.logaddexp(others, target_logit)
    certain = (target_logit == INF) & (others < INF) & (not label_smoothing and not z_loss)
    log_sum = torch.where((log_sum == INF) & ~certain, float("nan"), log_sum)
    loss = torch.where(certain, 0, log_sum - target_logit)
    loss = loss if weights is None else weights * loss
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing / count * (all_weight * log_sum - spread)
    return torch.where(keep, loss + z_loss * log_sum.square() if z_loss else loss, 0), log_sum


def backward(
    grad, input, linear_weight, target, log_sum, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss,
    *needs,
):  # fmt: skip
    place, keep, weights = rows_of(len(linear_weight), target, weight, mask, ignore_index, torch.float64)
    return gradients(
        grad, input, linear_weight, linear_bias, place, keep, weights, log_sum,
        existing_of(len(linear_weight), linear_bias, weight, input.device),  # (nobody else holds it: it is to be freed)
        label_smoothing, z_loss, needs,
    )  # fmt: skip


def gradients(
    grad, input, linear_weight, linear_bias, place, keep, weights, log_sum, existing, label_smoothing, z_loss, needs,
    finish=lambda d_input: d_input,
):  # fmt: skip
    """Those that are needed, the others empty. finish: of the input's gradient in fp32 once all chunks are in it, with
    the weight's last product still to be made. place: counted from the first class of linear_weight."""
    need_input, need_weight, need_bias = needs
    compute = compute_dtype(input.dtype, grad.dtype)
    x = torch.where(keep.unsqueeze(1), input, 0)
    g = torch.where(keep, grad, 0).double()
    scale = scale_of(x, linear_weight, g, log_sum, weights, existing, z_loss)
    g = g if scale is None else g * scale
    slopes = slopes_by(x, weights, label_smoothing, z_loss)
    slopes = slopes(g, keep, log_sum, weights, existing, label_smoothing, z_loss, compute)
    del existing  # a number for each class, which not all slopes keep
    d_input = x.new_zeros(x.shape if need_input else 0, dtype=compute)  # fp32 over the chunks
    d_weight = torch.empty_like(linear_weight if need_weight else x[:0, :0], memory_format=torch.contiguous_format)
    d_bias = x.new_empty(len(linear_weight) if need_bias else 0)

    def scaled_back(d_input):
        d_input.masked_fill_(~keep.unsqueeze(1), 0)  # (of a row that does not exist: 0 times what is not finite)
        return finish(d_input if scale is None else d_input.div_(scale))

    if need_input and not len(linear_weight):
        d_input = scaled_back(d_input)
    with without_autocast(x):
        for part, logits in chunks_of(x, linear_weight, linear_bias):
            slope = slopes(logits, place - part.start, part)
            if need_bias:
                d_bias[part] = sums.total(slope, dim=0)
            slope = slope.to(x.dtype)
            if need_input and compute == x.dtype:
                d_input.addmm_(slope, linear_weight[part])
            elif need_input:
                d_input += slope @ linear_weight[part]
            if need_input and part.stop >= len(linear_weight):
                d_input = scaled_back(d_input)
            if need_weight:
                torch.mm(slope.mT, x, out=d_weight[part])
            del logits, slope  # before the next are made
    if scale is not None:
        d_weight.div_(scale)
        d_bias.div_(scale)
    return d_input.to(x.dtype), d_weight, d_bias


# The slopes to the logits of a chunk, share p - even w, less the own part at the row's class, p = exp(logit - log_sum):
# by the backward kernel of cross_entropy, or in torch.


def slopes_by(x, weights, label_smoothing, z_loss):
    """Which of the two. Class weights are a factor of the row for the kernel; but not of the smoothing, nor of the
    z-loss."""
    by_kernel = _cross_entropy.runs_on(x.device) and (weights is None or not (label_smoothing or z_loss))
    return _slopes_by_kernel if by_kernel else _slopes


def _slopes_by_kernel(g, keep, log_sum, weights, existing, label_smoothing, z_loss, compute):
    count, g = existing[2], (g if weights is None else g * weights).to(compute)
    high = log_sum.to(compute).double()  # exact in the kernel's arithmetic
    row_stats = [high, torch.where(high.isinf(), 0, log_sum - high), label_smoothing / count.expand(log_sum.shape)]
    row_stats = torch.stack(row_stats[: 3 if label_smoothing else 2]).to(compute)

    def slopes(logits, place, part):
        options = keep, NO_CLASS, label_smoothing, z_loss
        return _cross_entropy.backward(g, logits, place, row_stats, None, *options, True, False, True)[0]

    return slopes


def _slopes(g, keep, log_sum, weights, existing, label_smoothing, z_loss, compute):
    every, all_weight, count = existing
    keep = keep & (log_sum != INF)  # (those of a row that is certain are 0)
    log_sum = torch.where(keep, log_sum, INF)  # p = 0
    target_factor = (1 - label_smoothing) * (g if weights is None else g * weights)
    even = label_smoothing * g / count
    factor = target_factor + all_weight * even + torch.where(keep, 2 * z_loss * log_sum * g, 0)
    even, every = even.to(compute), every.to(compute)
    high = log_sum.to(compute)
    low = torch.where(log_sum.isinf(), 0, log_sum - high)  # what it loses there
    high, low, factor, target_factor = (t.to(compute).unsqueeze(1) for t in (high, low, factor, target_factor))

    def slopes(logits, place, part):
        slope = logits.to(compute).sub_(high).sub_(low).exp_().mul_(factor)
        if label_smoothing:
            slope.addr_(even, every[part], alpha=-1)
        at, inside = own_of(place, logits.shape[1])
        slope.scatter_add_(1, at, torch.where(inside.unsqueeze(1), -target_factor, 0))
        return slope.masked_fill_(~keep.unsqueeze(1), 0)  # (0 times a logit that is not finite)

    return slopes


def scale_of(x, linear_weight, g, log_sum, weights, existing, z_loss):
    """A power of two that brings the slopes to the logits, and the products made of them, to the upper end of fp16: of
    a mean over many rows they would vanish, of a scaled loss overflow. The gradients are divided by it again: one too
    large for fp16 becomes inf there. None for other dtypes. g: the upstream gradient of each row."""
    if x.dtype != torch.float16 or not x.numel() or not linear_weight.numel():
        return None
    most = 1 if weights is None else torch.maximum(weights.abs(), existing[1].abs() / existing[2])
    rows = (g * most * (1 + 2 * z_loss * log_sum.abs() if z_loss else 1)).abs()
    low, high = torch.aminmax(linear_weight)
    largest = torch.maximum(-low, high).double()
    most = torch.maximum(rows.sum() * x.abs().amax().double().clamp(min=1), 2 * rows.amax() * largest.clamp(min=1))
    return torch.where(most.isfinite() & (most > 0), to_one(most) * 2.0**14, 1)

"""Divergences of DTensors of logits: each rank runs the local kernel on its rows.

With sharded classes, each rank's kernel gives the maxima and logsumexps of its classes, one all-gather gives them to
all ranks, and the local backward kernel reads the row_stats of whole rows that are computed from them. No logits are
moved. For Kullback-Leibler, D(p | q) = sum_r P_r (D_r + log(P_r / Q_r)), with P_r and Q_r the probabilities of rank r's
classes under p and q. The other divergences need the whole row's maximum and logsumexp first: the ranks read their
logits a second time, and one all-reduce adds up the sums.
"""

import torch
from torch.distributed.tensor import Replicate

from safeops.core.dtypes import compute_dtype
from safeops.distributed._collectives import add_up, gather
from safeops.distributed._layout import layout, local, share_rows, shared
from safeops.ops.divergences.kl_div_with_logits import _kl_div_with_logits

INF = float("inf")


class Pair:
    """A rank's part of both logits, in one layout. keep: bool for its rows, True = kept, or None."""

    def __init__(self, input, target, keep):
        self.mesh, self.shape, self.placements = layout([input, target])
        self.x, self.y = (local(t, self.shape, self.placements) for t in (input, target))
        cut = [p.is_shard(len(self.shape) - 1) for p in self.placements]
        self.rows = [Replicate() if by_class else p for by_class, p in zip(cut, self.placements)]
        keep = local(keep, self.shape[:-1], self.rows)
        self.keep = None if keep is None else keep.contiguous()
        self.parts = [i for i, by_class in enumerate(cut) if by_class and self.shape[-1]]  # mesh dims of the classes

    def share(self, result):
        return share_rows(result, self.mesh, self.shape[:-1], self.rows)


def forward(op, *operands):
    input, target, keep, temperature, beta = op.operands(*operands)
    of = Pair(input, target, keep)
    if of.parts:
        results = _of_parts(op, of, temperature, beta)
    else:
        results = op.forward(of.x, of.y, of.keep, temperature, beta)
    return tuple(map(of.share, results))


def gradients(op, grad, needs, operands, results):
    of = Pair(*operands[:3])
    local_operands = op.Operands(of.x, of.y, of.keep, *operands[3:])
    saved = op.Saved(results.row_stats.to_local())
    result = op.gradients(local(grad, of.shape[:-1], of.rows), needs, local_operands, saved)
    pairs = zip(result, operands, needs)
    return [shared(d, of.mesh, of.shape, of.placements, x) if need else None for d, x, need in pairs]


def _of_parts(op, of, temperature, beta):
    """The raw forward's results of whole rows, from the row_stats of each rank's classes."""

    def sums(whole):
        return op.sums(of.x, of.y, whole, of.keep, temperature, beta)

    columns = part_columns(of.x, of.y, of.keep, temperature)
    return whole_rows(op.name, of.mesh, of.parts, columns, temperature, op.sums and sums)


def part_columns(x, y, keep, temperature):
    """(5, *rows) over a rank's classes: the row_stats of input and target, and the Kullback-Leibler divergence."""
    if x.shape[-1]:  # (kl_div_with_logits, for any divergence: it reads the logits once)
        loss, row_stats = _kl_div_with_logits.forward(x, y, keep, temperature)
        return torch.stack((*row_stats[:4], loss))
    return x.new_full((5, *x.shape[:-1]), -INF, dtype=compute_dtype(x.dtype, y.dtype))


def whole_rows(name, mesh, parts, columns, temperature, sums):
    """Returns (loss, row_stats) of whole rows, from the `part_columns` of this rank; `parts` are the mesh dims of the
    classes. sums(row_stats): what `_sums` computes over this rank's classes; None for kl."""
    compute = columns.dtype
    columns = gather(name, columns, mesh, parts).double()  # (ranks, 5, *rows)
    maxima, log_totals, losses = columns[:, :4:2], columns[:, 1:4:2], columns[:, 4]
    has_none = log_totals == -INF  # all logits of a rank's classes are -inf
    maxima = torch.where(has_none, -INF, maxima)
    maximum = maxima.amax(0)  # (2, *rows), of the input and of the target
    log_sums = torch.where(has_none, -INF, (maxima - maximum) / temperature + log_totals)
    log_total = log_sums.logsumexp(0)
    row_stats = torch.stack((maximum, log_total), 1).flatten(0, 1)
    if sums is None:
        log_q, log_p = (log_sums - log_total).unbind(1)  # log Q_r and log P_r: (ranks, *rows)
        p = log_p.exp()
        terms = p * (torch.where(has_none[:, 0], 0, losses) + log_p - log_q)
        loss = torch.where(p == 0, 0, terms).sum(0)
        slopes = torch.full_like(loss, -1), loss
    else:
        whole = torch.cat((row_stats, torch.zeros_like(maximum))).to(compute)
        *slopes, loss = add_up(name, sums(whole).double(), mesh, parts)
    return loss.to(compute), torch.cat((row_stats, torch.stack(slopes))).to(compute)

"""token_log_probs of DTensors: each rank runs the local kernel on its rows.

With sharded classes, each rank's kernel gives the logsumexp and the entropy of its own classes. One all-gather gives
them to all ranks, 24 bytes a row with the logit of the row's class; the largest logit and its class add 16 bytes. The
local backward kernel reads the row_stats of whole rows, computed from them. No logits are moved.
"""

import torch

from safeops.core.dtypes import compute_dtype
from safeops.distributed._classes import INF, NO_CLASS, Rows
from safeops.distributed._collectives import gather
from safeops.distributed._layout import local, shared
from safeops.distributed._vocabulary_stats import index_in
from safeops.ops.classification._classification import class_dim
from safeops.ops.classification._logits import shaped


def forward(op, *operands):
    input, target, mask, ignore_index, *shape = op.operands(*operands)
    of = Rows(input, target, None, mask, ignore_index)
    if of.part is None:
        results = op.forward(of.x, of.target, of.mask, NO_CLASS, *shape)
    else:
        results = _of_parts(op, of, *shape)
    return tuple(map(of.share, results))


def gradients(op, grad, needs, operands, results):
    input, target, mask, ignore_index, *shape = operands
    of, row_stats = Rows(input, target, None, mask, ignore_index), results.row_stats
    g = local(grad, torch.Size((3, *of.shape)), [_behind(p) for p in of.rows])
    partial = of.part is not None
    d = op.backward(g, of.x, of.target - of.first, row_stats.to_local(), of.mask, NO_CLASS, *shape, partial)
    return (shared(d, of.mesh, of.input.shape, of.placements, input),)


def _behind(placement):
    """The placement after an unsharded dim is added in front: Shard(d) becomes Shard(d + 1)."""
    return type(placement)(placement.dim + 1) if placement.is_shard() else placement


def _of_parts(op, of, temperature, softcap):
    """The raw forward's results of whole rows, from the row_stats of each rank's classes."""
    columns = part_columns(op, of.x.detach(), of.target - of.first, of.mask, of.first, temperature, softcap)
    columns = gather(op.name, columns, of.mesh, [of.part])
    rows, row_stats = whole_rows(columns, of.mask, compute_dtype(of.x.dtype))
    return rows, *_argmax(of, *columns[:, 3:].unbind(1)), row_stats


def part_columns(op, input, class_index, mask, first, temperature, softcap):
    """(3, *rows) in fp64: over a rank's classes each row's logsumexp and entropy; the logit of the row's class, or 0 if
    another rank has it. (5, *rows) if op returns the argmax: also the largest logit, and its class.

    class_index: relative to the rank's first class. first: the index of that class."""
    x = input.movedim(class_dim(input), -1)
    at, inside = index_in(x.shape[-1], class_index)
    if x.shape[-1]:
        own = shaped(x.gather(-1, at).squeeze(-1).double(), temperature, softcap)
        _, *best, row_stats = op.forward(input, at.squeeze(-1), mask, NO_CLASS, temperature, softcap)
        maximum, log_total, entropy = row_stats.double()
        if best:
            argmax, _ = best
            best = x.gather(-1, argmax.unsqueeze(-1)).squeeze(-1).double(), argmax.double() + first
    else:
        own = maximum = log_total = entropy = torch.full(x.shape[:-1], -INF, dtype=torch.float64, device=x.device)
        best = (own, own) if op.visible > 1 else ()
    has_none = maximum == -INF  # all logits of a rank's classes are -inf
    log_sum, entropy = torch.where(has_none, -INF, maximum + log_total), torch.where(has_none, 0, entropy)
    return torch.stack((log_sum, entropy, torch.where(inside, own, 0), *best))


def whole_rows(columns, mask, compute):
    """Returns (log_prob, entropy and logsumexp of whole rows; row_stats for backward), (3, *rows) each, in the dtype
    `compute`, from the `part_columns` of all ranks (ranks, 3 or 5, *rows)."""
    log_sums, entropies, own, *_ = columns.unbind(1)
    log_sum, own = log_sums.logsumexp(0), own.sum(0)
    # A +inf logit has probability 1 if it is the row's class and the only +inf; else the results are NaN.
    certain = (own == INF) & ((log_sums == INF).sum(0) == 1) & ~log_sums.isnan().any(0)
    log_sum = torch.where(log_sum.isinf() & ~certain, float("nan"), log_sum)
    share = (log_sums - log_sum).exp()
    terms = torch.where(share == 0, 0, share * (entropies + log_sum - log_sums))  # H = sum_r P_r (H_r - log P_r)
    entropy = torch.where(certain, 0, terms.sum(0))
    log_prob = torch.where(certain, 0, own - log_sum)
    leading = log_sum.to(compute).double()
    rest = torch.where(leading.isinf(), 0, log_sum - leading)
    rows, row_stats = torch.stack((log_prob, entropy, log_sum)), torch.stack((leading, rest, entropy))
    return tuple(torch.where(mask, result, 0).to(compute) for result in (rows, row_stats))


def _argmax(of, *best):
    """Returns (argmax, correct) from each rank's largest logit and its class, or nothing."""
    if not best:
        return ()
    largest, classes = best
    part = largest.argmax(0, keepdim=True)  # the first of equal ones; NaN is the largest
    argmax = torch.where(of.mask, classes.gather(0, part).squeeze(0), 0).long()
    return argmax, of.mask & (argmax == of.target)

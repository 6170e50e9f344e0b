"""cross_entropy and nll_loss of DTensors: each rank runs the local kernel on its rows.

With sharded classes (vocabulary parallel), each rank computes sums over its own classes, one all-gather of 16 bytes a
row gives them to all ranks, and the local backward kernel reads the logsumexp computed from them. No logits are moved.
nll_loss needs only the value at each row's class, which one rank has: one all-reduce of 8 bytes a row.
"""

import functools

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from safeops.core import sums
from safeops.core.dtypes import compute_dtype
from safeops.distributed._collectives import add_up, gather
from safeops.distributed._layout import Uncovered, local, share_rows, shared
from safeops.distributed._vocabulary_stats import index_in
from safeops.ops.classification._classification import class_dim, row_shape, rows_of
from safeops.ops.classification._logits import shaped, slope_of_shape
from safeops.ops.reductions.masked_logsumexp import _masked_logsumexp

INF = float("inf")
NO_CLASS = torch.iinfo(torch.int64).min  # passed as ignore_index: the mask already says which rows are kept


class Rows:
    """A rank's local operands x, target, weight and mask, and their layout.

    target: indices of classes that exist, or probabilities. weight: of the local classes. mask: True for kept rows.
    weights: for each row the weight of its class, or None. first: the index of the rank's first class.
    """

    def __init__(self, input, target, weight, mask, ignore_index):
        if not isinstance(input, DTensor):
            raise Uncovered
        self.mesh, self.input, self.dim = input.device_mesh, input, class_dim(input)
        if self.mesh.get_coordinate() is None or not all(
            type(p) is Shard or p.is_replicate() or p.is_partial() for p in input.placements
        ):
            raise Uncovered
        self.placements = [p if p.is_shard() else Replicate() for p in input.placements]
        parts = [i for i, p in enumerate(self.placements) if p.is_shard(self.dim)]
        if len(parts) > 1:
            raise Uncovered
        self.part = parts[0] if parts else None  # the mesh dim that shards the classes
        self.shape = torch.Size(row_shape(input))
        self.rows = [
            Shard(p.dim - (p.dim > self.dim)) if p.is_shard() and p.dim != self.dim else Replicate()
            for p in self.placements
        ]
        everywhere, self.has_probabilities = [Replicate()] * self.mesh.ndim, target.is_floating_point()
        self.x = local(input, input.shape, self.placements)
        weight = None if weight is None else local(weight, weight.shape, everywhere)
        mask = local(mask, self.shape, self.rows)
        if self.has_probabilities:
            self.target, self.weights = local(target, input.shape, self.placements), None
            per_row = self.x.select(self.dim, 0) if self.x.shape[self.dim] else self.x.sum(self.dim)
            kept = torch.ones_like(per_row, dtype=torch.bool)
            self.mask = kept if mask is None else kept & mask
        else:
            target = local(target, self.shape, self.rows)
            compute = compute_dtype(input.dtype, *(() if weight is None else (weight.dtype,)))
            self.target, self.mask, self.weights = rows_of(
                input.shape[self.dim], target, weight, mask, ignore_index, compute
            )
        self.weight, self.first = weight, 0
        if self.part is not None:
            step = -(-input.shape[self.dim] // self.mesh.size(self.part))
            self.first = min(input.shape[self.dim], step * self.mesh.get_local_rank(self.part))
            if weight is not None:
                self.weight = weight[self.first : self.first + self.x.shape[self.dim]]

    def operands(self):
        return self.x, self.target, self.weight, self.mask, NO_CLASS

    def share(self, result):
        """A result with one or more numbers for each row, as a DTensor."""
        if result.shape == (0,) and self.mask.shape != (0,):  # an empty result, left out by the op
            return shared(result, self.mesh, result.shape, [Replicate()] * self.mesh.ndim)
        return share_rows(result, self.mesh, self.shape, self.rows)


def forward(op, *operands):
    _, _, _, _, _, *options = operands = op.operands(*operands)
    of = Rows(*operands[:5])
    if of.part is None:
        results = op.forward(*of.operands(), *options)
    else:
        results = (_of_parts if op.takes_logits else _of_owners)(op, of, *options)
    return tuple(map(of.share, results))


def gradients(op, grad, needs, operands, results):
    _, _, _, _, _, *options = operands
    of, saved = Rows(*operands[:5]), op.Saved(*(r.to_local() for r in results))
    g = local(grad, of.shape, of.rows)
    if of.part is None:
        result = op.gradients(g, needs, op.Operands(*of.operands(), *options), saved)
    elif op.takes_logits:
        result = _gradients_of_part(op, of, g, saved.row_stats, *options, needs[:2])
    else:
        x, target, weight, mask, _ = of.operands()
        at, inside = index_in(x.shape[of.dim], target - of.first)
        result = op.gradients(g, needs, op.Operands(x, at.squeeze(-1), weight, mask & inside, NO_CLASS), saved)
    return [
        shared(d, of.mesh, of.input.shape, of.placements, t) if need else None
        for d, t, need in zip(result, operands, needs)
    ]


# ---- classes that are sharded


def _sum(x, mask, weight=None):
    """The sum of each row, in fp64."""
    return sums.total(x, mask, dim=-1, weight=weight, dtype=torch.float64)


def _target_logit(of, x):
    """For each row x at the row's class if this rank has it, else 0. x: (*rows, local classes)."""
    at, inside = index_in(x.shape[-1], of.target - of.first)
    return torch.where(inside, x.gather(-1, at).squeeze(-1), 0) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _of_owners(op, of):
    """The raw forward's results for rows whose classes are sharded: the rank that has a row's class gives -x there, the
    others 0; their sum over the ranks is multiplied by the row's weight."""
    losses = torch.where(of.mask, -_target_logit(of, of.x.detach().movedim(of.dim, -1)), 0).double()
    loss, dtype = add_up(op.name, losses, of.mesh, [of.part]), compute_dtype(of.x.dtype)
    loss = (loss if of.weights is None else torch.where(of.mask, loss * of.weights, 0)).to(dtype)
    return loss, of.mask, loss.new_empty(0) if of.weights is None else of.weights


def _of_parts(op, of, label_smoothing, z_loss, temperature, softcap):
    """The raw forward's results of whole rows, from `columns`: sums over each rank's classes.

    (1) L = logsumexp(x). With class indices t = x at the row's class, m = its weight or 1, loss = m (L - t).
    (2) With probabilities q, already times the class weights: t = sum q x, m = sum q, loss = m L - t.
    (3) Label smoothing s over C existing classes: loss <- (1 - s) loss + s / C (L sum w - sum w x).
    (4) z-loss z: loss <- loss + z L^2.
    """
    x, smooth = of.x.detach().movedim(of.dim, -1), label_smoothing != 0
    if softcap or temperature != 1:
        x = shaped(x.to(compute_dtype(x.dtype)), temperature, softcap)
    weight = None if of.weight is None else of.weight.detach()
    if x.shape[-1]:
        log_sum, _, scale = _masked_logsumexp.forward(x, dim=[-1], dtype=torch.float64)
    else:
        log_sum = scale = x.new_full(x.shape[:-1], float("-inf"), dtype=torch.float64)
    if of.has_probabilities:
        q = of.target.detach().movedim(of.dim, -1)
        if weight is not None:
            compute = compute_dtype(x.dtype, q.dtype, weight.dtype)
            q = q.to(compute) * weight.to(compute)
        columns = [log_sum, _sum(x, q != 0, q), _sum(q, None)]
    else:
        target_logit = _target_logit(of, x)
        # A +inf logit has probability 1 if it is the row's class and the only +inf; else L is NaN.
        certain = (target_logit == INF) & (scale == 1) & (not smooth and not z_loss)
        columns = [torch.where((log_sum == INF) & ~certain, float("nan"), log_sum), target_logit]
    if smooth:
        exists = x != float("-inf")
        every = None if weight is None else weight.expand(x.shape)
        columns += [_sum(x, exists, every), _sum(exists.to(torch.float32), None)]
        columns.append(columns[-1] if every is None else _sum(every, exists))
    log_sum, target_logit, *rest = over_parts(op.name, of.mesh, of.part, torch.stack([c.double() for c in columns]))
    mass = (
        rest.pop(0)
        if of.has_probabilities
        else torch.ones_like(target_logit)
        if of.weights is None
        else of.weights.double()
    )
    if of.has_probabilities:
        loss = torch.where(mass == 0, 0, mass * log_sum) - target_logit
    else:
        loss = mass * torch.where((log_sum == INF) & (target_logit == INF), 0, log_sum - target_logit)
    dtype = compute_dtype(x.dtype, *((of.target.dtype,) if of.has_probabilities else ()))
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    leading = log_sum.to(compute).double()
    row_stats = [leading, torch.where(leading.isinf(), 0, log_sum - leading)]
    if of.has_probabilities or (weight is not None and smooth):
        row_stats.append((1 - label_smoothing) * mass)
    if smooth:
        logit_sum, count, all_weight = rest
        loss = (1 - label_smoothing) * loss + label_smoothing / count * (all_weight * log_sum - logit_sum)
        row_stats[2:] = [n + label_smoothing * all_weight / count for n in row_stats[2:]]
        row_stats.append(label_smoothing / count)
    if z_loss:
        loss = loss + z_loss * log_sum.square()
    loss = torch.where(of.mask, loss, 0).to(dtype)
    weights = loss.new_empty(0) if of.weights is None else of.weights
    return loss, of.mask, weights, torch.where(of.mask, torch.stack(row_stats), 0).to(compute)


def _gradients_of_part(op, of, g, row_stats, label_smoothing, z_loss, temperature, softcap, needs):
    """The gradients from the local kernel. A row's class, and so its weight, may be another rank's: without label
    smoothing the row's weight is multiplied into g."""
    x, target, weight, mask, _ = of.operands()
    need_input, need_target = needs
    backward = functools.partial(
        op.backward, input=x, row_stats=row_stats, mask=mask, ignore_index=NO_CLASS, temperature=temperature,
        softcap=softcap, need_input=need_input, need_target=need_target, partial=True,
    )  # fmt: skip
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss}
    if of.has_probabilities:
        return backward(g, target=target, weight=weight, **options)
    target, factor = target - of.first, None
    if weight is not None and not label_smoothing:
        factor, weight = of.weights, None
    if factor is None or not z_loss:
        g = g if factor is None else g * factor
        return backward(g, target=target, weight=weight, **options)
    # dx_c = g ((w + 2 z L) p_c - w [c = y]), L the logsumexp. (1) The kernel computes the first term, with target -1,
    # no class. (2) The code below overwrites the row's class y.
    slope = g * (factor + 2 * z_loss * row_stats.sum(0))
    d, other = backward(slope, target=torch.full_like(target, -1))
    if x.shape[of.dim]:
        last = d.movedim(of.dim, -1)
        at, inside = index_in(last.shape[-1], target)
        logit = x.detach().movedim(of.dim, -1).gather(-1, at).squeeze(-1).to(slope.dtype)
        target_slope = slope * (shaped(logit, temperature, softcap) - row_stats[0] - row_stats[1]).exp() - g * factor
        target_slope = target_slope * slope_of_shape(logit, temperature, softcap)
        keeps = (inside & mask).unsqueeze(-1)
        last.scatter_(-1, at, torch.where(keeps, target_slope.unsqueeze(-1).to(d.dtype), last.gather(-1, at)))
    return d, other


def over_parts(function, mesh, part, columns):
    """Combine the columns of the ranks that share the rows, by one all-gather: logsumexp of the first column, sums of
    the others.

    part: the mesh dim that shards the classes.
    """
    result = gather(function, columns, mesh, [part])
    return result[:, 0].logsumexp(0), *result[:, 1:].sum(0)

"""Reductions of DTensors: each rank reduces its shard by the local kernel, then the ranks' results are combined.

Totals and their divisors are added up by an all-reduce. For a statistic a few numbers of each result and rank are
gathered, and the definition of the statistic is applied to them. It gives two more numbers beside the value, with which
the local backward kernel needs no collective.
"""

import torch
from torch.distributed.tensor import Replicate, Shard

from safeops.core import check, loss_reduction, sums
from safeops.core.dtypes import compute_dtype
from safeops.distributed._collectives import add_up, gather
from safeops.distributed._layout import Uncovered, layout, local, shared
from safeops.ops.reductions._statistic import Parts, finish


def combined(function, parts, mesh, dims, mean, denominator, empty_nan):
    """Returns (value, divisor) in fp64. parts: this rank's total, the sum of its weights (or None), its count.

    denominator: a mean's divisor in place of the count or the sum of weights, or None.
    """
    _, weights, _ = parts
    partials = add_up(function, torch.stack([x.double() for x in parts if x is not None]), mesh, dims)
    value, count = partials[0], partials[-1]
    by = count if weights is None else partials[1]
    if mean:
        by = by if denominator is None else denominator.double()
        value = loss_reduction.divide(value, count, by, denominator is not None, empty_nan)
        return value, by if denominator is None else torch.where(by == 0, float("inf"), by)
    return torch.where(count > 0, value, float("nan") if empty_nan else 0.0), by


def kernel(op, x):
    """The op's raw forward, as a part of another op. Uncovered if the op has no kernel on x's device."""
    if not op.runs_on(x.device):
        raise Uncovered
    return op.forward


def count(x, mask, weight, dims):
    return kernel(sums.masked_count, x)(x, mask, weight, dims, True)


class Reduced:
    """The layout of a call.

    placements: of the input. dims: the reduced dims. kept: placements of a result that keeps the reduced dims. cut: the
    mesh dims that shard the reduced dims. lost: the dims that the final result lacks.
    """

    def __init__(self, op, input, mask, weight, dim, keepdim):
        self.mesh, self.shape, self.placements = layout([x for x in (input, mask, weight) if x is not None])
        self.dims = check.dims(op.name, dim, len(self.shape))
        self.cut = [i for i, p in enumerate(self.placements) if p.is_shard() and p.dim in self.dims]
        self.kept = [Replicate() if i in self.cut else p for i, p in enumerate(self.placements)]
        self.lost = () if keepdim else self.dims
        self.operands = [local(x, self.shape, self.placements) for x in (input, mask, weight)]

    def _where(self):
        """The placements of the final result."""
        return [Shard(p.dim - sum(d < p.dim for d in self.lost)) if p.is_shard() else p for p in self.kept]

    def share(self, result):
        """The final result as a DTensor, from a local result that has the reduced dims."""
        shape = torch.Size(1 if d in self.dims else n for d, n in enumerate(self.shape) if d not in self.lost)
        result = result.squeeze(self.lost) if self.lost else result
        return shared(result, self.mesh, shape, self._where())

    def local_part(self, result):
        """This rank's part of a result, or of its gradient, with the reduced dims."""
        result = local(result, result.shape, self._where())
        for d in self.lost:
            result = result.unsqueeze(d)
        return result


def forward(op, *operands):
    input, mask, weight, dim, keepdim, *options = op.operands(*operands)
    of = Reduced(op, input, mask, weight, dim, keepdim)
    if not of.cut:
        results = op.forward(*of.operands, list(of.dims), True, *options)
    else:
        results = (_statistic if op.shards == "statistic" else _total)(op, of, *options)
    return tuple(map(of.share, results))


def gradients(op, grad, needs, operands, results):
    input, mask, weight, dim, keepdim, *options = operands
    of = Reduced(op, input, mask, weight, dim, keepdim)
    parts = [of.local_part(t) for t in (grad, *results)]
    operands = op.Operands(*of.operands, list(of.dims), True, *options)
    (d,) = op.gradients(parts[0], needs, operands, op.Saved(*parts[1:]))
    return (shared(d, of.mesh, of.shape, of.placements, input),)


def counts(op, *operands):
    """The forward of masked_count: each rank counts its shard, and the counts are added up."""
    of = Reduced(op, *op.operands(*operands))
    return of.share(add_up(op.name, count(*of.operands, list(of.dims)), of.mesh, of.cut))


def _total(op, of, empty_nan, dtype):
    """A sum or mean over sharded dims."""
    (x, mask, weight), dims = of.operands, list(of.dims)
    raw = kernel(sums.masked_mean if weight is None else sums.masked_sum, x)
    wide = torch.float64 if weight is not None or dtype == torch.float64 else None  # (fp64 takes twice as long)
    value, by = raw(x, mask, weight, dims, True, False, wide)
    parts = (value.double() * by, None, by) if weight is None else (value, by, count(x, mask, weight, dims))
    value, by = combined(op.name, parts, of.mesh, of.cut, op.shards == "mean", None, empty_nan)
    return value.to(dtype or compute_dtype(x.dtype)), by


def _statistic(op, of, empty_nan, dtype, parameter):
    result = parts_of(op.name, op, of.operands, of.dims, parameter, of.mesh, of.cut, dtype)
    results = finish(op.statistic, result, float("nan") if empty_nan else 0.0, parameter)
    return tuple(t.squeeze(0) for t in results)


def parts_of(function, op, operands, dims, parameter, mesh, cut, dtype=None):
    """The Parts of a statistic over all ranks' elements, by one all-gather."""
    (x, mask, weight), dims = operands, list(dims)
    part, of_part = op.of_part or (op, parameter)
    results = kernel(part, x)(x, mask, weight, dims, True, False, torch.float64, of_part)
    columns = {"count": count(x, mask, weight, dims), **op.part(*results, of_part)}
    if op.weighs and weight is not None:
        columns["weight"] = sums.total(weight.expand(x.shape), mask, dims, keepdim=True, dtype=torch.float64)
    result = gather(function, torch.stack([c.double() for c in columns.values()]), mesh, cut)
    columns = dict(zip(columns, result.unbind(1)))
    if op.weighs:
        columns.setdefault("weight", columns["count"])
    return Parts(dtype or compute_dtype(x.dtype), **columns)

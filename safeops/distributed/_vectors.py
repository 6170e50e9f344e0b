"""The softmax family, normalize and cosine_similarity of DTensors.

If the vectors' dim is sharded, each rank computes the numbers of its part (maximum and sum of exponentials; norm;
cosine and norms), one all-gather gives them to all ranks, and each rank finishes its own elements. In backward, one
all-reduce adds up the inner product of gradient and result; cosine_similarity needs none.
"""

import torch
from torch.distributed.tensor import Replicate, Shard

from safeops.core import check
from safeops.core.dtypes import compute_dtype
from safeops.core.sums import total
from safeops.distributed._collectives import add_up, gather
from safeops.distributed._layout import layout, local, shared
from safeops.distributed._reductions import parts_of
from safeops.ops.reductions._statistic import finish, reciprocal
from safeops.ops.reductions.masked_logsumexp import _masked_logsumexp
from safeops.ops.reductions.masked_norm import _masked_norm, masked_norm
from safeops.ops.vectors.normalize import resolve_eps


class Vectors:
    """The layout of a call. dim: the vectors' dim. cut: the mesh dims that shard it."""

    def __init__(self, op, dim, *operands):
        self.op = op
        self.mesh, self.shape, self.placements = layout([x for x in operands if x is not None])
        self.dim = check.one_dim(op.name, dim, len(self.shape))
        self.cut = [i for i, p in enumerate(self.placements) if p.is_shard(self.dim)]
        self.operands = [local(x, self.shape, self.placements) for x in operands]

    def share(self, x, like=None):
        """A result in the operands' broadcast shape, as a DTensor."""
        return shared(x, self.mesh, self.shape, self.placements, like)

    def share_stats(self, x):
        """A result with one number for each vector, as a DTensor; with the vectors' dim (1) or without it."""
        keepdim = x.dim() == len(self.shape)
        shape = [*self.shape[: self.dim], *([1] if keepdim else []), *self.shape[self.dim + 1 :]]
        return shared(x, self.mesh, torch.Size(shape), self._stats_placements(keepdim))

    def local_stats(self, x):
        """This rank's part of a DTensor with one number for each vector."""
        return local(x, x.shape, self._stats_placements(x.dim() == len(self.shape)))

    def _stats_placements(self, keepdim):
        kept = [Replicate() if i in self.cut else p for i, p in enumerate(self.placements)]
        return [Shard(p.dim - (not keepdim and p.dim > self.dim)) if p.is_shard() else p for p in kept]

    def statistic(self, op, x, mask, parameter=0.0):
        """Returns (value, origin, scale) of a statistic over the vectors, in fp64."""
        where = self.mesh, self.cut, torch.float64
        result = parts_of(self.op.name, op, (x, mask, None), (self.dim,), parameter, *where)
        return tuple(t.squeeze(0) for t in finish(op.statistic, result, 0.0, parameter))

    def inner(self, terms, mask=None):
        """The sum of terms over the vectors, in fp64."""
        part = total(terms, mask, [self.dim], keepdim=True, dtype=torch.float64)
        return add_up(self.op.name, part, self.mesh, self.cut)


# ---- softmax


def softmax(op, input, mask=None, dim=-1, log=False):
    of = Vectors(op, dim, input, mask)
    x, mask = of.operands
    if of.cut:
        value, maximum, scale = of.statistic(_masked_logsumexp, x, mask)
        # a vector with +inf, or with -inf alone, has no softmax: NaN
        sums = torch.where(value.isinf(), float("nan"), reciprocal(scale))
        y = _softmax(x, mask, maximum, sums, log)
    else:
        y, maximum, sums = op.forward(x, mask, of.dim, log)
    return of.share(y, input), of.share_stats(maximum), of.share_stats(sums)


def _softmax(x, mask, maximum, sums, log):
    compute = compute_dtype(x.dtype)
    y = x.to(compute) - maximum.to(compute)
    y = y - sums.log().to(compute) if log else y.exp_().div_(sums.to(compute))
    y = y if mask is None else torch.where(mask, y, float("-inf") if log else 0.0)
    return y.to(x.dtype)


def softmax_gradients(op, grad, needs, operands, results):
    input, mask, dim, log = operands  # input: the result, if that was saved instead
    of = Vectors(op, dim, input, mask)
    (x, mask), g = of.operands, local(grad, of.shape, of.placements)
    row_stats = [None if t is None else of.local_stats(t) for t in results]
    if not of.cut:
        (d,) = op.gradients(g, needs, op.Operands(x, mask, of.dim, log), op.Saved(*row_stats))
    else:
        compute = compute_dtype(x.dtype, g.dtype)
        g, y = g.to(compute), x.to(compute)
        y = y if results.maximum is None else _softmax(y, mask, *row_stats, False)
        # softmax y: dx = y (g - sum g y); log_softmax: dx = g - y sum g
        sums = of.inner(g if log else g * y, mask).to(compute)
        d = g - y * sums if log else y * (g - sums)
        d = (d if mask is None else torch.where(mask, d, 0)).to(x.dtype)
    return (of.share(d, input),)


# ---- normalize


def normalize(op, input, dim=-1, eps=None):
    of = Vectors(op, dim, input)
    (x,) = of.operands
    if of.cut:
        norm, _, _ = of.statistic(_masked_norm, x, None, 2.0)
        y = _divided(x, _divisor(norm, eps, x.dtype))
    else:
        y, norm = op.forward(x, of.dim, eps)
    return of.share(y, input), of.share_stats(norm)


def _divisor(norm, eps, dtype):
    """max(norm, eps), and 1 for a zero vector."""
    return torch.where(norm == 0, 1, norm.clamp(min=resolve_eps(eps, compute_dtype(dtype))))


def _divided(x, divisor, dtype=None):
    """x / divisor in fp64, where no norm overflows, rounded once."""
    return torch.div(x, divisor, out=torch.empty_like(x, dtype=dtype))


def normalize_gradients(op, grad, needs, operands, results):
    input, dim, eps = operands
    of = Vectors(op, dim, input)
    (x,), g, norm = of.operands, local(grad, of.shape, of.placements), of.local_stats(results.norm)
    if not of.cut:
        (d,) = op.gradients(g, needs, op.Operands(x, of.dim, eps), op.Saved(norm))
    else:
        # dx = (g - y sum g y) / norm; below eps, g / eps
        divisor, wide = _divisor(norm, eps, x.dtype), compute_dtype(x.dtype, g.dtype)
        y, g = _divided(x, divisor, wide), g.to(wide)
        sums = torch.where(norm < divisor, 0, of.inner(g * y)).to(wide)
        d = _divided(g - y * sums, torch.where(norm == 0, float("inf"), divisor), x.dtype)
    return (of.share(d, input),)


# ---- cosine


def cosine(op, x1, x2, dim=-1, eps=None):
    of = Vectors(op, dim, x1, x2)
    if not of.cut:
        results = op.forward(*of.operands, of.dim, eps)
    else:
        results = _cosine_of_parts(of, eps, *op.forward(*of.operands, of.dim, None))
    return tuple(map(of.share_stats, results))


def _cosine_of_parts(of, eps, value, *norms):
    partial = torch.stack([value.unsqueeze(of.dim).double(), *norms])
    cosines, *parts = gather(of.op.name, partial, of.mesh, of.cut).unbind(1)
    norms = [masked_norm(p, dim=0) for p in parts]
    least = torch.finfo(value.dtype).tiny  # the forward divides a part with a smaller norm by this
    for part, norm in zip(parts, norms):
        cosines = cosines * (part.clamp(min=least) / _divisor(norm, eps, value.dtype))
    return cosines.sum(0).clamp(-1, 1).squeeze(of.dim).to(value.dtype), *norms


def cosine_gradients(op, grad, needs, operands, results):
    x1, x2, dim, eps = operands
    of = Vectors(op, dim, x1, x2)
    g, *row_stats = map(of.local_stats, (grad, *results))
    # A broadcast operand's gradient is summed later, over ranks too: it is not rounded to half before that.
    inputs = [t if x.shape == of.shape else t.to(compute_dtype(t.dtype)) for t, x in zip(of.operands, (x1, x2))]
    result = op.gradients(g, needs, op.Operands(*inputs, of.dim, eps), op.Saved(*row_stats))
    return [of.share(d, x) if need else None for d, x, need in zip(result, (x1, x2), needs)]

"""DTensors: the local kernel on the local shards, in both directions, and one collective of what the ranks found.

An op says by its attribute `shards` how its parts combine: "elementwise"; "loss", a pointwise one; "rows", one of rows
that have a class; "vocabulary", with the linear layer before it; "sum" and "mean" over dims; "reduction", any other,
over dims of which each rank has all. What is not covered here takes the composite, whose aten ops know DTensors.
"""

import copy
import functools
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from safeops import _check, _loss, _op
from safeops._dtypes import compute_dtype
from safeops._route import PLAIN
from safeops._torch import schema
from safeops.distributed import _classes, _vocabulary
from safeops.distributed._group import group_of_mesh
from safeops.distributed._layout import Uncovered, layout, local, shared


def call(op, operands):
    """The results of an op of which an operand is a DTensor; None: the composite is to give them."""
    tensors = [x for x in operands[: op.tensors] if isinstance(x, torch.Tensor)]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if wanted and op.constant and any(x is not None and x.requires_grad for x in operands[op.constant]):
        return None
    if not op.runs_on(tensors[0].device):
        return None
    mesh = next(x.device_mesh for x in tensors if isinstance(x, DTensor))
    try:
        if not wanted:
            return _shown(op, _over_ranks(op).forward(*operands))
        # A plain number that has a gradient is every rank's: its gradient is the sum of theirs.
        everywhere = [Replicate()] * mesh.ndim
        operands = [
            DTensor.from_local(x, mesh, everywhere) if type(x) in PLAIN and x.requires_grad else x for x in operands
        ]
        return _over_ranks(op).function.apply(*operands)
    except Uncovered:
        return None


def _shown(op, results):
    if op.returns == op.visible:
        return results
    return results[0] if op.visible == 1 else results[: op.visible]


@functools.cache
def _over_ranks(op):
    """The op as it is of DTensors: a raw forward and backward that take and give them, and its autograd Function."""
    made = copy.copy(op)
    made.forward = functools.partial(FORWARD[op.shards], op)
    made.by_composite = lambda grad: torch.is_grad_enabled()
    if op.shards in GRADIENTS:
        made.linear, made.reads = 0, slice(0, op.tensors)
        made.gradients = functools.partial(GRADIENTS[op.shards], op)
    elif op.backward:
        made.backward = functools.partial(_elementwise, op.backward)
    made.function = _op._function(made)
    return made


# ---- elementwise


@functools.cache
def _count_tensors(raw):
    return sum("Tensor" in str(x.type) for x in schema(raw).arguments)


def _elementwise(raw, *operands):
    """A raw op whose results have the broadcast shape of its tensors, or are left out."""
    count = _count_tensors(raw)
    tensors = [x for x in operands[:count] if x is not None]
    mesh, shape, placements = layout(tensors)
    results = raw(*(local(x, shape, placements) for x in operands[:count]), *operands[count:])
    like = next((x for x in tensors if x.shape == shape), None)
    several = isinstance(results, (tuple, list))
    made = [
        shared(x, mesh, shape, placements, like) if x.dim() == len(shape) else x
        for x in (results if several else (results,))
    ]
    return tuple(made) if several else made[0]


def _each(op, *operands):
    return _elementwise(op.forward, *operands)


# ---- sums and means


def _add_up(partials, mesh, dims):
    """The sum of the ranks' partial results along some dims of the mesh, by one collective."""
    if not dims:
        return partials
    try:
        group = group_of_mesh("all_reduce", mesh, dims)
    except ValueError:  # several of the dims of a mesh without names
        raise Uncovered from None
    dist.all_reduce(partials, group=group)
    return partials


def _combined(own, mesh, dims, mean, given, empty_nan):
    """(value, what it was divided by) in fp64. own: the rank's total, the sum of its weights (or None), its count.

    given: what a mean is divided by instead, or None.
    """
    _, weights, _ = own
    partials = _add_up(torch.stack([x.double() for x in own if x is not None]), mesh, dims)
    total, count = partials[0], partials[-1]
    by = count if weights is None else partials[1]
    if mean:
        by = by if given is None else given.double()
        value = _loss.divide(total, count, by, given is not None, empty_nan)
        return value, by if given is None else torch.where(by == 0, float("inf"), by)
    return torch.where(count > 0, total, float("nan") if empty_nan else 0.0), by


def _count(x, mask, weight, dims):
    return _op.registry["masked_count"].call(x, mask, dims, True, weight, None, "zero")


def _loss_of_all(op, *operands):
    """A pointwise loss. (total, count) of each rank, with weights (total, sum of weights, count)."""
    operands += op.defaults[len(operands) :]
    n = op.count
    mask, weight, denominator, reduction, *parameters, empty_nan, divisor = operands[n:]
    if reduction == 0:
        return _elementwise(op.forward, *operands[: n + 2], None, *operands[n + 3 :])
    tensors = [x for x in operands[:n] if x is not None]
    mesh, shape, placements = layout([x for x in (*tensors, mask, weight) if x is not None])
    x, y, *rest = (local(t, shape, placements) for t in (*operands[:n], mask, weight))
    mask, weight = rest[-2:]
    # From a mean the sum is had again in fp64, where it does not overflow. Weights may cancel, and a mean is then lost.
    code = 1 if weight is None else 2
    value, by = op.forward(x, y, *rest, None, code, *parameters, False, None)
    if weight is None:
        own = value.double() * by, None, by
    else:
        here = torch.broadcast_shapes(*(t.shape for t in (x, y, *rest[:-2]) if t is not None))
        own = value, by, _count(x.expand(here), mask, weight, None).reshape(())
    given = local(denominator, (), [Replicate()] * mesh.ndim)
    if divisor is not None:
        given = by.new_full((), divisor)
    dims = [i for i, p in enumerate(placements) if p.is_shard()]
    found, used = _combined(own, mesh, dims, reduction == 1, given, empty_nan)
    everywhere = [Replicate()] * mesh.ndim
    return tuple(shared(t, mesh, torch.Size(), everywhere) for t in (found.to(value.dtype), used))


def _reduced_layout(op, input, mask, weight, dim):
    """(mesh, placements of the input, of the reduced dims kept, the dims, those of the mesh to be combined)."""
    mesh, shape, placements = layout([x for x in (input, mask, weight) if x is not None])
    dims = _check.dims(op.name, dim, len(shape))
    combined = [i for i, p in enumerate(placements) if p.is_shard() and p.dim in dims]
    kept = [Replicate() if i in combined else p for i, p in enumerate(placements)]
    if op.shards == "reduction" and any(_leaves_one_out(shape, mesh, placements, d) for d in dims):
        return mesh, kept, kept, dims, []  # gathered: torch's own would raise on that rank, and the others wait
    return mesh, placements, kept, dims, combined


def _leaves_one_out(shape, mesh, placements, dim):
    """Whether a rank may have nothing of a dim, which is cut into parts of one size as far as it goes."""
    ranks = prod(mesh.size(i) for i, p in enumerate(placements) if p.is_shard(dim))
    return ranks > 1 and -(-shape[dim] // ranks) * (ranks - 1) >= shape[dim]


def _reduction(op, *operands):
    """A reduction. Over dims that no rank has a part of: the local kernel alone; else of sums and means as a loss."""
    input, mask, weight, dim, keepdim, empty_nan, dtype, *parameter = *operands, *op.defaults[len(operands) :]
    mesh, placements, kept, dims, combined = _reduced_layout(op, input, mask, weight, dim)
    if combined and op.shards == "reduction":
        raise Uncovered
    x, mask, weight = (local(t, input.shape, placements) for t in (input, mask, weight))
    dims = list(dims)
    if not combined:
        results = op.forward(x, mask, weight, dims, True, empty_nan, dtype, *parameter)
    else:
        raw = _op.registry["masked_mean" if weight is None else "masked_sum"].forward
        wide = None if weight is None else torch.float64
        value, by = raw(x, mask, weight, dims, True, False, wide)
        own = (value.double() * by, None, by) if weight is None else (value, by, _count(x, mask, weight, dims))
        value, by = _combined(own, mesh, combined, op.shards == "mean", None, empty_nan)
        results = value.to(dtype or compute_dtype(input.dtype)), by
    lost = () if keepdim else dims
    shape = [1 if d in dims else n for d, n in enumerate(input.shape) if d not in lost]
    where = [Shard(p.dim - sum(d < p.dim for d in lost)) if p.is_shard() else p for p in kept]
    results = [r.squeeze(tuple(lost)) if lost else r for r in results]
    return tuple(shared(r, mesh, torch.Size(shape), where) for r in results)


def _reduction_gradients(op, grad, needs, operands, results):
    input, mask, weight, dim, keepdim, *_ = operands
    mesh, placements, kept, dims, _ = _reduced_layout(op, input, mask, weight, dim)
    gathered = placements is kept and any(p.is_shard() and p.dim in dims for p in input.placements)
    lost = () if keepdim else dims

    def one_each(t):
        """A result, or its gradient, with the reduced dims."""
        where = [Shard(p.dim - sum(d < p.dim for d in lost)) if p.is_shard() else p for p in kept]
        t = local(t, t.shape, where)
        for d in lost:
            t = t.unsqueeze(d)
        return t

    own_operands = [local(t, input.shape, placements) for t in (input, mask, weight)]
    own = [one_each(t) for t in (grad, *results)]
    (d,) = op.gradients(own[0], needs, [*own_operands, list(dims), True, *operands[5:]], own[1:])
    d = shared(d, mesh, input.shape, placements, input)
    return (d.redistribute(placements=input.placements) if gathered else d,)


REDUCTIONS = "sum", "mean", "reduction"
FORWARD = {
    "elementwise": _each,
    "loss": _loss_of_all,
    "rows": _classes.forward,
    "vocabulary": _vocabulary.forward,
    **dict.fromkeys(REDUCTIONS, _reduction),
}
# Of inputs as they are laid out: a linear op would keep nothing of them.
GRADIENTS = {
    "rows": _classes.gradients,
    "vocabulary": _vocabulary.gradients,
    **dict.fromkeys(REDUCTIONS, _reduction_gradients),
}

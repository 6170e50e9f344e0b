"""Calls on DTensors: each rank runs the local kernel on its shards, forward and backward, and one collective combines
the partial results.

An op's attribute `shards` says how its parts combine: "elementwise"; "loss": a pointwise loss; "rows": rows with a
class each; "log_probs": log-probabilities of such rows; "divergence": of rows of logits; "vocabulary",
"linear_log_probs", "linear_divergence": losses of rows and log-probabilities and divergences after a linear layer;
"sum", "mean", "statistic" and "count" over dims; "softmax", "normalize" and "cosine" of vectors. Any other call goes to
the composite, whose aten ops take DTensors.
"""

import copy
import functools

import torch
from torch.distributed.tensor import DTensor, Replicate

from safeops.core.autograd import autograd_function
from safeops.core.group import here
from safeops.core.library import raise_cause
from safeops.core.private_torch import schema
from safeops.core.route import PLAIN
from safeops.distributed import (
    _classes,
    _divergences,
    _linear_divergences,
    _linear_log_probs,
    _log_probs,
    _reductions,
    _vectors,
    _vocabulary,
)
from safeops.distributed._agreement import watched
from safeops.distributed._layout import Uncovered, for_composite, layout, local, shared


def call(op, operands, takes):
    """The results of an op with a DTensor among its operands. takes: True if the kernel takes such arguments."""
    results = _by_kernel(op, operands) if takes and op.shards else None
    return _named(op, _by_composite)(*operands) if results is None else results


def _by_composite(op, *operands):
    return op.composite(*map(for_composite, operands))


def _by_kernel(op, operands):
    """The results from the local kernel, or None if the composite must compute them."""
    tensors = [x for x in operands[: op.tensors] if isinstance(x, torch.Tensor)]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if wanted and any(x is not None and x.requires_grad for x in operands[op.constant_places]):
        return None
    if not op.runs_on(tensors[0].device):
        return None
    mesh = next(x.device_mesh for x in tensors if isinstance(x, DTensor))
    try:
        if not wanted:
            return _shown(op, _over_ranks(op).forward(*operands))
        # A plain tensor that needs a gradient is the same on every rank: its gradient is the sum of the ranks'.
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
    """A copy of the op for DTensors: its raw forward, backward and autograd Function take and return DTensors."""
    dtensor_op = copy.copy(op)
    dtensor_op.forward = _named(op, FORWARD[op.shards])
    dtensor_op.by_composite = lambda grad: torch.is_grad_enabled()
    if op.shards in GRADIENTS:
        dtensor_op.linear, dtensor_op.read_places = 0, slice(0, op.tensors)
        dtensor_op.gradients = _named(op, GRADIENTS[op.shards], op.forward, "gradient", "needs_input_grad")
        dtensor_op.composite_gradients = functools.partial(_composite_gradients, dtensor_op)
    elif op.backward:
        dtensor_op.backward = _named(op, _backward, op.backward)
    dtensor_op.function = autograd_function(dtensor_op)
    return dtensor_op


def _named(op, function, raw=None, *first):
    """Wrap an op's function: the ranks can compare its calls, and an error of torch's collectives names op and rank, as
    those of safeops do.

    first: names of the leading operands. raw: the raw op whose argument names follow; None: op.forward.
    """
    name, arguments = op.name + " in backward" * (raw is not None), schema(raw or op.forward).arguments

    def described(operands):
        values = (*operands[:2], *operands[2]) if first else operands
        defaults = [x.default_value for x in arguments[len(values) - len(first) :]]
        return dict(zip((*first, *(x.name for x in arguments)), (*values, *defaults)))

    def call(*operands):
        try:
            with watched(name, described, operands):
                return function(op, *operands)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise_cause(error)
            if str(error).startswith(op.name):
                raise
            raise RuntimeError(f"{here(op.name)}: {error}") from error

    return call


def _composite_gradients(op, grad, needs, operands, results):
    full_operands = op.Operands(*map(for_composite, operands))
    result = type(op).composite_gradients(op, grad, needs, full_operands, results)
    inputs = [operands[i] for i in op.gradient_places]
    return [
        d
        if d is None or d.shape != x.shape
        else d.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
        for d, x in zip(result, inputs)
    ]


# ---- elementwise


@functools.cache
def _count_tensors(raw):
    return sum("Tensor" in str(x.type) for x in schema(raw).arguments)


def _elementwise(raw, *operands):
    """Run a raw op whose results have the broadcast shape of its tensors, or are left out."""
    count = _count_tensors(raw)
    tensors = [x for x in operands[:count] if x is not None]
    mesh, shape, placements = layout(tensors)
    results = raw(*(local(x, shape, placements) for x in operands[:count]), *operands[count:])
    like = next((x for x in tensors if x.shape == shape), None)
    several = isinstance(results, (tuple, list))
    outputs = [
        shared(x, mesh, shape, placements, like) if x.dim() == len(shape) else x
        for x in (results if several else (results,))
    ]
    return tuple(outputs) if several else outputs[0]


def _each(op, *operands):
    return _elementwise(op.forward, *operands)


def _backward(op, *operands):
    return _elementwise(op.backward, *operands)


# ---- pointwise losses


def _loss_of_all(op, *operands):
    """A pointwise loss. Each rank's partial results: total and count; with weights total, sum of weights and count."""
    args = op.operands(*operands)
    if args.reduction == 0:
        return _elementwise(op.forward, *args._replace(denominator=None))
    n, parameters = op.count, args[op.count + 4 : -2]
    mesh, shape, placements = layout([x for x in (*args[:n], args.mask, args.weight) if x is not None])
    x, y, *rest = (local(t, shape, placements) for t in (*args[:n], args.mask, args.weight))
    mask, weight = rest[-2:]
    # Without weights take the mean, times the count in fp64: a sum that does not overflow. With weights take the sum:
    # the weights may add up to 0, and a mean would be lost.
    code = 1 if weight is None else 2
    value, by = op.forward(x, y, *rest, None, code, *parameters, False, None)
    if weight is None:
        partials = value.double() * by, None, by
    else:
        here = torch.broadcast_shapes(*(t.shape for t in (x, y, *rest[:-2]) if t is not None))
        partials = value, by, _reductions.count(x.expand(here), mask, weight, None).reshape(())
    denominator = local(args.denominator, (), [Replicate()] * mesh.ndim)
    if args.divisor is not None:
        denominator = by.new_full((), args.divisor)
    dims = [i for i, p in enumerate(placements) if p.is_shard()]
    mean = args.reduction == 1
    result, used = _reductions.combined(op.name, partials, mesh, dims, mean, denominator, args.empty_nan)
    everywhere = [Replicate()] * mesh.ndim
    return tuple(shared(t, mesh, torch.Size(), everywhere) for t in (result.to(value.dtype), used))


REDUCTIONS = "sum", "mean", "statistic"
FORWARD = {
    "elementwise": _each,
    "loss": _loss_of_all,
    "rows": _classes.forward,
    "log_probs": _log_probs.forward,
    "divergence": _divergences.forward,
    "vocabulary": _vocabulary.forward,
    "linear_log_probs": _linear_log_probs.forward,
    "linear_divergence": _linear_divergences.forward,
    "count": _reductions.counts,
    **dict.fromkeys(REDUCTIONS, _reductions.forward),
    "softmax": _vectors.softmax,
    "normalize": _vectors.normalize,
    "cosine": _vectors.cosine,
}
# These gradients need the inputs' layouts; for a linear op the inputs would not be kept.
GRADIENTS = {
    "rows": _classes.gradients,
    "log_probs": _log_probs.gradients,
    "divergence": _divergences.gradients,
    "vocabulary": _vocabulary.gradients,
    "linear_log_probs": _linear_log_probs.gradients,
    "linear_divergence": _linear_divergences.gradients,
    **dict.fromkeys(REDUCTIONS, _reductions.gradients),
    "softmax": _vectors.softmax_gradients,
    "normalize": _vectors.normalize_gradients,
    "cosine": _vectors.cosine_gradients,
}

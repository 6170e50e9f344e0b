"""linear_cross_entropy of DTensors: each rank goes through its own classes in chunks, for its rows.

With the classes of linear_weight sharded (vocabulary parallel), a rank computes the logits of its own classes. One
all-gather of 16 bytes a row gives all ranks the rows' sums. One collective adds up the ranks' terms of the input's
gradient, while the last product of the weight's gradient runs.
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from safeops.core.dtypes import compute_dtype
from safeops.core.matmul import without_autocast
from safeops.distributed._classes import over_parts
from safeops.distributed._layout import Uncovered, local, shared
from safeops.distributed._vocabulary_stats import RowStats, existing_classes, losses, row_stats
from safeops.ops.classification._classification import rows_of
from safeops.ops.linear import _chunks, _rows


class Part:
    """A rank's part of a call: rows, and classes of the linear layer.

    A mesh dim shards the rows, the classes or neither. If it shards both (sequence parallel), the rows are gathered.
    Classes stay sharded along the first mesh dim that shards them; along others, and if their shards are strided
    (FSDP's), they are gathered.
    """

    def __init__(self, operands):
        input, linear_weight, target, linear_bias, weight, mask = operands[:6]
        ignore_index, label_smoothing = operands.ignore_index, operands.label_smoothing
        if not (isinstance(input, DTensor) and isinstance(linear_weight, DTensor)):
            raise Uncovered
        self.mesh, self.rows_shape = input.device_mesh, input.shape[:-1]
        if self.mesh.get_coordinate() is None:
            raise Uncovered
        sharded = [i for i, p in enumerate(linear_weight.placements) if type(p) is Shard and p.dim == 0]
        self.part = sharded[0] if sharded else None
        self.rows = [
            p if type(p) is Shard and p.dim < input.dim() - 1 and i != self.part else Replicate()
            for i, p in enumerate(input.placements)
        ]
        self.classes = [Shard(0) if i == self.part else Replicate() for i in range(self.mesh.ndim)]
        everywhere, classes = [Replicate()] * self.mesh.ndim, len(linear_weight)
        x = local(input, input.shape, self.rows)
        self.local_rows, self.x = x.shape[:-1], x.reshape(x.shape[:-1].numel(), x.shape[-1])
        self.linear_weight = local(linear_weight, linear_weight.shape, self.classes)
        bias = None if linear_bias is None else local(linear_bias, linear_bias.shape, self.classes)
        self.linear_bias, self.first = bias, 0
        if self.part is not None:
            self.first = min(classes, -(-classes // self.mesh.size(self.part)) * self.mesh.get_local_rank(self.part))
        weight = None if weight is None else local(weight, weight.shape, everywhere)
        target, mask = (local(t, self.rows_shape, self.rows) for t in (target, mask))
        compute = compute_dtype(input.dtype, *(() if weight is None else (weight.dtype,)))
        rows = rows_of(classes, target, weight, mask, ignore_index, compute)
        class_index, self.keep, self.weights = (None if t is None else t.reshape(-1) for t in rows)
        self.class_index = class_index - self.first
        if label_smoothing and linear_bias is not None:  # a bias of -inf marks a class that does not exist
            bias = local(linear_bias, linear_bias.shape, everywhere)
        existing = existing_classes(classes, bias if label_smoothing else None, weight, x.device)
        part = slice(self.first, self.first + len(self.linear_weight))
        self.existing = existing._replace(weights=existing.weights[part])
        self.weight = None if weight is None else weight[part]

    def share(self, result):
        """A result with a number for each row, or an empty one that the op left out, as a DTensor."""
        if result.shape != self.keep.shape:
            return shared(result, self.mesh, result.shape, [Replicate()] * self.mesh.ndim)
        return shared(result.view(self.local_rows), self.mesh, self.rows_shape, self.rows)


def forward(op, *operands):
    args = op.operands(*operands)
    label_smoothing, z_loss = args.label_smoothing, args.z_loss
    of = Part(args)
    with without_autocast(of.x):
        chunks = _chunks.chunks_of(of.x, of.linear_weight, of.linear_bias, args.wide)
        stats = row_stats(
            chunks, of.class_index, of.existing.weights if label_smoothing else None, args.temperature, args.softcap
        )
    if of.part is not None:
        others, class_logit, weighted_sum = stats
        columns = [others, class_logit]
        if label_smoothing:
            columns.append(class_logit.new_zeros(()).expand_as(class_logit) + weighted_sum)
        others, class_logit, *sums = over_parts(op.name, of.mesh, of.part, torch.stack(columns))
        stats = RowStats(others, class_logit, sums[0] if label_smoothing else 0)
    dtype = compute_dtype(args.input.dtype)
    loss, log_sum = losses(stats, of.keep, of.weights, of.existing, label_smoothing, z_loss)
    loss = loss.to(dtype)
    weights = loss.new_empty(0) if of.weights is None else of.weights
    gradients = _rows.empty_gradients(of.x, of.linear_weight, [False] * 3)
    results = loss, of.keep, weights, log_sum, loss.new_empty(0), *gradients  # (backward makes row_stats of log_sum)
    return tuple(map(of.share, results))


def _row_stats(of, log_sum, label_smoothing):
    """The row_stats that cross_entropy's backward kernel reads: (numbers per row, rows)."""
    compute = compute_dtype(of.x.dtype, *(() if of.weight is None else (of.weight.dtype,)))
    leading = log_sum.to(compute).double()  # exact in the kernel's dtype; the rest follows as a second number
    row_stats = [leading, torch.where(leading.isinf(), 0, log_sum - leading)]
    if label_smoothing:
        uniform = label_smoothing / of.existing.size
        if of.weight is not None:
            row_stats.append((1 - label_smoothing) * of.weights + uniform * of.existing.total_weight)
        row_stats.append(uniform.expand(log_sum.shape))
    return torch.stack(row_stats).to(compute)


def gradients(op, grad, needs, operands, results):
    of, needs = Part(operands), (needs[0], needs[1], needs[3])
    g = local(grad, of.rows_shape, of.rows).reshape(-1)
    numbers = operands.label_smoothing, operands.z_loss, operands.temperature, operands.softcap
    row_stats = _row_stats(of, results.row_stats.to_local().reshape(-1), operands.label_smoothing)

    def added(d, like, placements):
        """Add up the ranks' terms of a gradient and lay it out as its operand `like`; the host does not wait."""
        d = DTensor.from_local(d, of.mesh, placements, run_check=False, shape=like.shape, stride=_strides(like.shape))
        return d.redistribute(placements=[Replicate() if p.is_partial() else p for p in like.placements])

    of_rows = [Partial() if i == of.part else p for i, p in enumerate(of.rows)]
    of_classes = [Partial() if p.is_shard() else of.classes[i] for i, p in enumerate(of.rows)]

    def finish(d_input):
        return added(d_input.view(*of.local_rows, of.x.shape[1]), operands.input, of_rows)

    d_input, *others = _rows.gradients(
        g, of.x, of.linear_weight, of.linear_bias, of.class_index, of.keep, of.weights, of.weight, row_stats,
        (*numbers, operands.wide), needs, finish=finish,
    )  # fmt: skip
    layer = operands.linear_weight, operands.linear_bias
    others = [added(d, x, of_classes) if need else None for d, x, need in zip(others, layer, needs[1:])]
    return [d_input if needs[0] else None, *others]


def _strides(shape):
    return torch.empty(shape, device="meta").stride()

"""linear_cross_entropy of DTensors: each rank goes through its own classes in chunks, for its rows.

With the classes of linear_weight sharded (vocabulary parallel), a rank computes the logits of its own classes. One
all-gather of 16 bytes a row gives all ranks the rows' sums. One collective adds up the ranks' terms of the input's
gradient, while the last product of the weight's gradient runs.
"""

import functools

import torch

from safeops.core.dtypes import compute_dtype
from safeops.core.matmul import without_autocast
from safeops.distributed._classes import over_parts
from safeops.distributed._layout import local
from safeops.distributed._linear import LayerPart
from safeops.distributed._vocabulary_stats import RowStats, existing_classes, losses, row_stats
from safeops.ops.classification._classification import rows_of
from safeops.ops.linear import _chunks, _rows


class Part(LayerPart):
    """A rank's rows with their classes, and the weights of the rank's classes."""

    def __init__(self, operands):
        input, linear_weight, target, linear_bias, weight, mask = operands[:6]
        ignore_index, label_smoothing, classes = operands.ignore_index, operands.label_smoothing, len(linear_weight)
        super().__init__(input, linear_weight, linear_bias)
        weight = None if weight is None else local(weight, weight.shape, self.everywhere)
        compute = compute_dtype(input.dtype, *(() if weight is None else (weight.dtype,)))
        rows = rows_of(classes, self.of_rows(target), weight, self.of_rows(mask), ignore_index, compute)
        class_index, self.keep, self.weights = rows
        self.class_index, bias = class_index - self.first, None
        if label_smoothing and linear_bias is not None:  # a bias of -inf marks a class that does not exist
            bias = local(linear_bias, linear_bias.shape, self.everywhere)
        existing = existing_classes(classes, bias, weight, self.x.device)
        part = slice(self.first, self.first + len(self.linear_weight))
        self.existing = existing._replace(weights=existing.weights[part])
        self.weight = None if weight is None else weight[part]


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
    numbers = operands.label_smoothing, operands.z_loss, operands.temperature, operands.softcap
    row_stats = _row_stats(of, results.row_stats.to_local().reshape(-1), operands.label_smoothing)
    compute = functools.partial(
        _rows.gradients, of.gradient_of_rows(grad), of.x, of.linear_weight, of.linear_bias, of.class_index, of.keep,
        of.weights, of.weight, row_stats, (*numbers, operands.wide), needs,
    )  # fmt: skip
    return of.gradients(compute, (operands.input, operands.linear_weight, operands.linear_bias), needs)

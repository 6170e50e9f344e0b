"""linear_token_log_probs of DTensors: each rank goes through its own classes in chunks, for its rows.

With the classes of linear_weight sharded, one all-gather of 24 bytes a row gives all ranks the logsumexp, entropy and
own logit of each rank's classes. Backward computes the logits again, and one collective adds up the ranks' terms of the
input's gradient, while the last product of the weight's gradient runs. No logits are moved.
"""

import functools

import torch

from safeops.core.dtypes import compute_dtype
from safeops.distributed._collectives import gather
from safeops.distributed._layout import Uncovered
from safeops.distributed._linear import LayerPart
from safeops.distributed._log_probs import part_columns, whole_rows
from safeops.ops.classification._classification import rows_of
from safeops.ops.classification.token_log_probs import _token_log_probs
from safeops.ops.linear import linear_token_log_probs as layer


class Tokens(LayerPart):
    """A rank's rows with their classes, which are relative to its first one."""

    def __init__(self, operands):
        input, linear_weight, target, linear_bias, mask, support, ignore_index = operands[:7]
        if support is not None:
            raise Uncovered
        super().__init__(input, linear_weight, linear_bias)
        target, mask = self.of_rows(target), self.of_rows(mask)
        class_index, self.keep, _ = rows_of(len(linear_weight), target, None, mask, ignore_index, torch.float64)
        self.class_index = class_index - self.first


def forward(op, *operands):
    operands = op.operands(*operands)
    *shape, wide = operands[7:]
    of = Tokens(operands)
    columns = of.x.new_empty((3, len(of.x)), dtype=torch.float64)
    for part, logits in layer.logits_of_rows(of.x, of.linear_weight, of.linear_bias, wide):
        rows = of.class_index[part], of.keep[part]
        columns[:, part] = part_columns(_token_log_probs, logits, *rows, of.first, *shape)
    columns = columns[None] if of.part is None else gather(op.name, columns, of.mesh, [of.part])
    return tuple(map(of.share, whole_rows(columns, of.keep, compute_dtype(of.x.dtype))))


def gradients(op, grad, needs, operands, results):
    of, needs = Tokens(operands), (needs[0], needs[1], needs[3])
    row_stats = results.row_stats.to_local().reshape(3, -1)
    compute = functools.partial(
        layer.gradients, of.gradient_of_rows(grad), of.x, of.linear_weight, of.linear_bias, of.class_index, of.keep,
        row_stats, None, *operands[7:], needs,
    )  # fmt: skip
    return of.gradients(compute, (operands.input, operands.linear_weight, operands.linear_bias), needs)

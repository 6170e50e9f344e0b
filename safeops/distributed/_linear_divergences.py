"""Divergences of linear layers' logits on DTensors: each rank goes through its own classes in chunks, for its rows.

With classes sharded, the ranks send what the divergences of rows of logits send: for Kullback-Leibler one all-gather of
20 bytes a row. The others compute their logits once more, and one all-reduce adds up 24 bytes a row. Backward computes
the logits again, and one collective adds up the ranks' terms of the input's gradient. No logits are moved.
"""

import functools

from safeops.core.dtypes import compute_dtype
from safeops.distributed._divergences import part_columns, whole_rows
from safeops.distributed._linear import LayerPart


class Layers(LayerPart):
    """A rank's part of the student's layer and of the teacher's, or of the teacher's logits: rows and classes.

    Classes are sharded as either of the two has them; those of the other are cut where they lie.
    """

    def __init__(self, operands):
        input, linear_weight, linear_bias, target, target_weight, target_bias, keep = operands[:7]
        has_logits = target_weight is None
        teacher = (target, target.dim() - 1) if has_logits else (target_weight, 0)
        super().__init__(input, linear_weight, linear_bias, [teacher])
        self.keep = self.of_rows(keep)
        y = self.vectors(target, with_classes=has_logits)
        self.layer = self.x, self.linear_weight, self.linear_bias
        self.teacher = y, self.of_layer(target_weight), self.of_layer(target_bias)

    def operands(self):
        return *self.layer, *self.teacher, self.keep


def forward(op, *operands):
    operands = op.operands(*operands)
    temperature, beta, wide = options = operands[7:]
    of = Layers(operands)
    if of.part is None:
        return tuple(map(of.share, op.forward(*of.operands(), *options)))

    def over_chunks(many, of_chunk):
        """(many, rows): of_chunk(slice of the rows, both logits, keep) of each chunk."""
        results = of.x.new_empty((many, len(of.x)), dtype=compute_dtype(of.x.dtype, of.teacher[0].dtype))
        for part, pair, keep in op.chunks(of.layer, of.teacher, of.keep, wide):
            results[:, part] = of_chunk(part, *pair, keep)
        return results

    def sums(whole):
        def of_chunk(part, x, y, keep):
            return op.op.sums(x, y, whole[:, part].contiguous(), keep, temperature, beta)

        return over_chunks(3, of_chunk)

    columns = over_chunks(5, lambda part, x, y, keep: part_columns(x, y, keep, temperature))
    results = whole_rows(op.name, of.mesh, [of.part], columns, temperature, op.op.sums and sums)
    return tuple(map(of.share, results))


def gradients(op, grad, needs, operands, results):
    of = Layers(operands)
    row_stats = results.row_stats.to_local().reshape(len(results.row_stats), -1)
    compute = functools.partial(
        op.compute_backward, of.gradient_of_rows(grad), row_stats, *of.operands(), *operands[7:], *needs[:3]
    )
    return of.gradients(compute, (operands.input, operands.linear_weight, operands.linear_bias), needs)

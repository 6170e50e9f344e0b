"""cross_entropy over the classes of a support."""

import torch

from safeops.core.dtypes import compute_dtype, wide_on_cpu
from safeops.core.loss_reduction import reduce
from safeops.core.symbolic import as_operand, symbolic
from safeops.ops.classification import _entries, _support
from safeops.ops.classification._classification import class_dim, normalized_weight, rows_of, weighed
from safeops.ops.classification._logits import shaped

OUTSIDE = """\
        outside: for a kept row whose target is not in its support: "-inf": its log probability, so that its loss is
            inf (its gradient is that of the logsumexp); "mask": it is masked out, and no mean counts it.
"""
NONE = '(N, d1, ...) for "none".\n'
RETURNS = """\
        With `support` a named tuple (loss, outside); outside: how many kept rows have a target that is not in their
        support, an int64 number on the device.
"""


def with_outside(arguments):
    """The docstring's arguments and results, with what a support adds to the results."""
    return arguments.replace(NONE, NONE + RETURNS)


def reduce_weighed(name, loss, keep, weights, row_weight, *options):
    """`reduce` with a weight for each row, on the graph, beside those of the classes."""
    if row_weight is None:
        return reduce(name, loss, keep, weights, *options)
    products, weights = weighed(loss, keep, weights, row_weight)
    return reduce(name, products, keep, weights, *options).to(loss.dtype)


def validate_support(name, target, outside, label_smoothing):
    """Check what else a call with a support has."""
    if target.is_floating_point():
        raise TypeError(f"{name}: support needs a target of class indices, got {target.dtype} (probabilities)")
    if outside == "-inf" and not symbolic(label_smoothing) and label_smoothing == 1:  # 0 times the inf of such a row
        raise ValueError(f'{name}: label_smoothing must be below 1 with support and outside="-inf", got 1')


def of_support(op, whole, operands, row_weight, reduction, denominator, empty, support, outside):
    """Returns (cross_entropy over the classes of a support, how many kept rows have another class).

    op: its record; whole: the public function. support: (support, support_threshold)."""
    name = op.name
    op.validate(*operands)
    input, target, weight, mask, ignore_index, label_smoothing, z_loss, temperature, softcap = operands
    dim, classes = class_dim(input), input.shape[class_dim(input)]
    support = _support.validate(name, *support, input.shape, dim, input=input)
    _support.validate_outside(name, support, outside)
    validate_support(name, target, outside, label_smoothing)
    if weight is not None:  # (a row whose class has weight 0 is masked out: it does not count as outside)
        _, mask, _ = rows_of(classes, target, weight, mask, ignore_index, compute_dtype(weight.dtype))
    options = reduction, denominator, empty
    if not isinstance(support, tuple):
        mask, count = _support.of_rows(name, support, outside, target, mask, ignore_index, dim)
        loss = whole(
            _support.restrict(input, support), target, weight, mask=mask, reduction=reduction,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, row_weight=row_weight,
            temperature=temperature, softcap=softcap, denominator=denominator, empty=empty,
        )  # fmt: skip
        return loss, count
    keep, index = _support.kept_rows(target, mask, ignore_index, classes)
    entries = _entries.Entries(name, support, keep, classes)
    count = entries.count_outside(entries.own(index)[1], outside)
    keep = entries.keep.reshape(target.shape)
    if weight is not None and (symbolic(z_loss) or z_loss != 0) and options[:2] == ("mean", None):
        weight = normalized_weight(weight, input, dim, target, keep, ignore_index, row_weight)
    dtype = compute_dtype(input.dtype)
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    weight = None if weight is None else weight.to(compute)
    _, keep, weights = rows_of(classes, target, weight, keep, ignore_index, compute)
    temperature, softcap, label_smoothing, z_loss = (
        as_operand(x, input) for x in (temperature, softcap or 0.0, label_smoothing, z_loss)
    )
    x = shaped(wide_on_cpu(entries.gather(input.movedim(dim, -1)).to(compute)), temperature, softcap)
    loss = _entries.losses(entries, x, index, weights, weight, label_smoothing, z_loss)
    loss = torch.where(keep, loss.reshape(keep.shape), 0).to(dtype)
    return reduce_weighed(name, loss, keep, weights, row_weight, *options), count

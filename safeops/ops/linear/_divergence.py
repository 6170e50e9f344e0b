"""Divergences between the logits of a linear layer and a teacher's, computed in chunks of the logits."""

import torch

from safeops.core import check
from safeops.core.composed_loss import ARGUMENTS as ROW_ARGUMENTS
from safeops.core.composed_loss import finish, validate
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.core.library import declare_raw
from safeops.core.matmul import without_autocast
from safeops.core.symbolic import as_float
from safeops.ops.classification import _best_classes
from safeops.ops.classification._support import INF, SUPPORT, has_classes
from safeops.ops.divergences import _support
from safeops.ops.divergences._divergence import ROW_STATS, validate_module, validate_options
from safeops.ops.linear import _rows
from safeops.ops.linear._best_classes import BestClasses
from safeops.ops.linear._chunks import blocks, logits_of, products, scale_of
from safeops.ops.linear._layer import (
    LOGITS_DTYPE,
    all_logits,
    in_one_dtype,
    validate_layer,
    validate_logits_dtype,
    wide_logits,
)
from safeops.ops.linear._layer_op import LayerOp

EXAMPLE = "torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.eye(2), torch.ones(2, 2)"
_OPERANDS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? target_weight, "
    "Tensor? target_bias, Tensor? keep, float temperature=1.0, float beta=0.5, bool wide=False"
)


def _empty(input, target):
    dtype, rows = compute_dtype(input.dtype, target.dtype), len(input)
    return input.new_empty(rows, dtype=dtype), input.new_empty((ROW_STATS, rows), dtype=dtype)


def _part(x, weight, bias, rows, classes, wide, support=None):
    """The logits of a slice of rows and a slice of classes, -inf outside of the support. If weight is None, x holds
    logits."""
    if weight is None:
        logits = x[rows, classes]
        return logits if support is None else logits.masked_fill(~support[rows, classes], -INF)
    logits = logits_of(x[rows], weight[classes], None if bias is None else bias[classes], wide=wide)
    return logits if support is None else logits.masked_fill_(~support[rows, classes], -INF)


def _split(keep):
    """Returns (bool (N,) or None, bool (N, C) or None): the rows that are kept, and the support of each."""
    if keep is None or keep.dim() == 1:
        return keep, None
    return has_classes(keep, 1), keep


class LinearDivergence(LayerOp):
    """The record of a divergence of the logits of linear layers. Matrix products of N x D x C: in forward one per
    layer; in backward the same again, and one each for the gradients of input and linear_weight. The operand keep is
    (N,): the rows that are kept; or (N, C): the classes that exist for each row.
    """

    shards = "linear_divergence"
    constant = ("target", "target_weight", "target_bias")
    example = EXAMPLE

    def __init__(self, name, module, op, swap=False):
        """op: the record of the divergence of two rows of logits. swap: exchange input and target."""
        self.module, self.op, self.swap, self.best = module, op, swap, BestClasses(name)
        forward = declare_raw(
            f"_{name}",
            f"({_OPERANDS}) -> (Tensor loss, Tensor row_stats)",
            fake=lambda input, weight, bias, target, *_: _empty(input, target),
            composite=self._compute,
        )
        backward = declare_raw(
            f"_{name}_backward",
            f"(Tensor grad, Tensor row_stats, {_OPERANDS}, bool need_input=True, bool need_weight=True, "
            "bool need_bias=True) -> (Tensor, Tensor, Tensor)",
            fake=lambda grad, row_stats, input, weight, *rest: tuple(_rows.empty_gradients(input, weight, rest[-3:])),
            composite=self.compute_backward,
        )
        super().__init__(name, forward, backward, self._define)

    def _pair(self, input, target):
        return (target, input) if self.swap else (input, target)

    def _define(
        self, input, linear_weight, linear_bias, target, target_weight, target_bias, keep, temperature=1.0, beta=0.5,
        wide=False,
    ):  # fmt: skip
        """The divergence of each row. Logits are in fp32 here, also if not wide."""
        compute, (keep, support) = compute_dtype(input.dtype, target.dtype), _split(keep)
        layers = (input, linear_weight, linear_bias), (target, target_weight, target_bias)
        logits = [all_logits(*layer, keep, compute) for layer in layers]
        if support is not None:
            logits = [torch.where(support, x, -INF) for x in logits]
        return self.op.definition(*self._pair(*logits), keep, temperature, beta)

    def _compute(
        self, input, linear_weight, linear_bias, target, target_weight, target_bias, keep, temperature, beta, wide
    ):
        """The forward in chunks of the rows. The divergence's forward op computes each chunk."""
        results = _empty(input, target)
        layers = (input, linear_weight, linear_bias), (target, target_weight, target_bias)
        for part, pair, exists in self.chunks(*layers, keep, wide):
            for whole, rows in zip(results, self.op.forward(*pair, exists, temperature, beta)):
                whole[..., part] = rows
        return results

    def chunks(self, layer, teacher, keep, wide):
        """Yield (slice of the rows, both logits in the order of the divergence's op, the rows' keep or None)."""
        everything, (keep, support) = slice(None), _split(keep)
        size = max(1, _rows.rows_at_once(*layer[:2], wide=wide) // 2)
        with without_autocast(layer[0]):
            for part in blocks(len(layer[0]), size):
                own, other = (_part(*x, part, everything, wide, support) for x in (layer, teacher))
                yield part, self._pair(own, other), None if keep is None else keep[part]

    def compute_backward(
        self, grad, row_stats, input, linear_weight, linear_bias, target, target_weight, target_bias, keep, temperature,
        beta, wide, *needs, **finish,
    ):  # fmt: skip
        """The backward in chunks of the classes. The divergence's backward op computes each chunk's slopes. finish: for
        `products`."""
        compute, everything, (keep, support) = compute_dtype(input.dtype, grad.dtype), slice(None), _split(keep)
        keep = torch.ones_like(grad, dtype=torch.bool) if keep is None else keep
        x, grad = torch.where(keep.unsqueeze(1), input, 0), torch.where(keep, grad, 0)
        # a bound of each row's |slope|: a slope is p times (a logarithm minus its mean, row_stats[4] or row_stats[5])
        largest = grad.double().abs() * (2 + row_stats[4].abs() + row_stats[5].abs()) / temperature
        scale = scale_of(x, linear_weight, largest)
        grad = (grad if scale is None else grad * scale).to(compute)

        def slopes(logits, part):
            other = _part(target, target_weight, target_bias, everything, part, wide, support)
            if support is not None:
                logits.masked_fill_(~support[:, part], -INF)
            needed = self._pair(True, False)
            both = self.op.backward(grad, *self._pair(logits, other), row_stats, keep, temperature, beta, *needed)
            return both[self.swap]

        return products(x, linear_weight, linear_bias, keep, slopes, scale, compute, needs, wide, **finish)

    def validate_options(self, name, reduction, empty, *options):
        """Check the options of a module's constructor."""
        *numbers, logits_dtype, tail = options
        validate_module(name, reduction, empty, *numbers, tail)
        validate_logits_dtype(name, logits_dtype)

    def gradients(self, grad, needs, operands, results):
        return self.backward(grad, results.row_stats, *operands, *needs[:3])

    def of_best(self, layer, values, indices, keep, temperature, beta, wide, tail):
        """The divergence of each row from a teacher given by its best classes."""
        pair = self.best.distributions(layer, values, indices, keep, temperature, wide, tail)
        return self.op.call(*self._pair(*pair), keep, 1.0, beta)

    def of_entries(self, layer, teacher, entries, temperature, beta):
        """The divergence of each row over the entries of a support: no other logit is computed."""

        def logits(x, weight, bias):
            if weight is None:
                return entries.gather(x)
            return self.best.entries.call(x, weight, entries.row, entries.classes, entries.exists, bias)

        pair = self._pair(logits(*layer), logits(*teacher))
        return _support.of_entries(self.op.terms, entries, *pair, temperature, beta)


# ---- for the public functions


def _validate_teacher(name, input, classes, target, target_weight, target_bias):
    rows = input.shape[:-1]
    if target_weight is None:
        check.floating(name, "target", target)
        if target_bias is not None:
            raise TypeError(f"{name}: target_bias needs target_weight")
        if target.shape != (*rows, classes):
            raise ValueError(
                f"{name}: target {check.shown(target)} must have logits of linear_weight's {classes} classes for each "
                f"of input's rows {check.shown(input, rows)}, or come with target_weight"
            )
        return
    validate_layer(name, target, target_weight, target_bias, ("target", "target_weight", "target_bias"))
    if target.shape[:-1] != rows or len(target_weight) != classes:
        raise ValueError(
            f"{name}: target {check.shown(target)} and target_weight {check.shown(target_weight)} must have "
            f"input's rows {check.shown(input, rows)} and linear_weight's {classes} classes"
        )


def linear_divergence(
    op, input, linear_weight, target, target_weight, linear_bias, target_bias, mask, weight, reduction, denominator,
    empty, temperature, logits_dtype, best, restriction, beta=0.5,
):  # fmt: skip
    """Validate the arguments, compute the divergences of the rows with `op`, and reduce them.

    best: (target_values, target_indices, tail). restriction: (support, support_threshold)."""
    name, (values, indices, tail) = op.name, best
    validate_layer(name, input, linear_weight, linear_bias)
    wide = wide_logits(name, logits_dtype, input, linear_weight, linear_bias)
    rows, classes = input.shape[:-1], len(linear_weight)
    _best_classes.validate_form(name, target, *best)
    operands = {"input": input, "linear_weight": linear_weight}
    if target is None:
        for key, x in {"target_weight": target_weight, "target_bias": target_bias}.items():
            if x is not None:
                raise TypeError(f"{name}: {key} needs target, the teacher's vectors")
        _best_classes.validate_best(name, input, values, indices, classes, "linear_weight")
        operands |= {"target_values": values, "target_indices": indices}
    else:
        _validate_teacher(name, input, classes, target, target_weight, target_bias)
        operands |= {"target": target, "target_weight": target_weight}
        if target_weight is not None:
            target, target_weight, target_bias = in_one_dtype(target, target_weight, target_bias)
    validate(name, rows, mask, weight, reduction, denominator, empty, **operands)
    validate_options(name, reduction, empty, temperature, beta)
    layer = in_one_dtype(input, linear_weight, linear_bias)
    keep, temperature, beta = kept(mask, weight), as_float(temperature), as_float(beta)
    of = {"input": input, "linear_weight": linear_weight, "target": target, "target_weight": target_weight}
    support = _support.validate(name, restriction, (*rows, classes), **of)
    if isinstance(support, tuple):
        entries = _support.entries_of(name, support, keep, rows, classes)
        keep = entries.keep.reshape(rows)
    elif support is not None:
        keep = _support.with_classes(name, support, keep, rows)
    exists = None if keep is None else keep.expand(rows)
    of_rows = [layer[0], *((target,) if target is not None else (values, indices))]
    if check.mesh(input) is None:  # (a DTensor keeps its dims, any of which may be sharded)
        # (no product of the rows' sizes: it would bind the sizes that an exported program takes)
        of_rows = [x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0) for x in of_rows]
        exists = None if exists is None else exists.reshape(-1)
    if isinstance(support, torch.Tensor):
        exists = (support.flatten(0, -2) if support.dim() > 1 else support.unsqueeze(0)) & exists.unsqueeze(1)
    x, *teacher = of_rows
    layer = x, *layer[1:]
    if target is None:
        values, indices = teacher
        teacher[1] = _best_classes.listed(name, values, indices, exists, classes, "linear_weight", linear_weight.shape)
        loss = op.of_best(layer, *teacher, exists, temperature, beta, wide, tail)
    elif isinstance(support, tuple):
        loss = op.of_entries(layer, (*teacher, target_weight, target_bias), entries, temperature, beta)
    else:
        loss = op.call(*layer, *teacher, target_weight, target_bias, exists, temperature, beta, wide)
    return finish(name, loss.reshape(rows), keep, weight, reduction, denominator, empty)


OF_LAYER = """\
            With a bool one, chunks of logits are filled with -inf. In CSR form there are no products of matrices and no
            other logits: rows of the weights are gathered for its classes, and multiplied in fp32.
"""
ARGUMENTS = (
    """\
        input: (..., D) floating tensor, a vector for each row.
        linear_weight: (C, D) tensor of `input`'s dtype. Under autocast they may differ: both are cast to its dtype.
        target: (..., E) floating tensor, the teacher's vectors.
        target_weight: (C, E) tensor of `target`'s dtype. None: `target` are the teacher's logits (..., C).
        linear_bias: (C,) tensor of `input`'s dtype.
        target_bias: (C,) tensor of `target`'s dtype.
        temperature: divides the logits of both, above 0.
"""
    + _best_classes.ARGUMENTS
    + """\
            Then no logits but those of the K classes are computed, from gathered rows of the weight, in fp32.
"""
    + SUPPORT.replace("is masked out.\n", "is masked out.\n" + OF_LAYER, 1)
    + LOGITS_DTYPE.replace("half operands", "half operands, the teacher's too,")
    + ROW_ARGUMENTS
    + """
    Raises:
        IndexError: on the CPU, an index of `target_indices` out of range in a kept row; it is raised before anything is
            computed. On other devices, and in compiled code, such an index is left out.
        TypeError: an operand is not floating, dtypes of a layer differ, `mask` is not bool, an option is of another
            type, or there is no target.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, a number out of range.
"""
)

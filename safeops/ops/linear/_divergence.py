"""Divergences between the logits of a linear layer and a teacher's, computed in chunks of the logits."""

import torch

from safeops.core import check
from safeops.core.composed_loss import ARGUMENTS as ROW_ARGUMENTS
from safeops.core.composed_loss import finish, validate
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.core.library import declare_raw
from safeops.core.matmul import matmul, without_autocast
from safeops.core.op import Op
from safeops.core.symbolic import as_float
from safeops.ops.divergences._divergence import ROW_STATS, validate_options
from safeops.ops.linear import _rows
from safeops.ops.linear._chunks import blocks, logits_of, products, scale_of
from safeops.ops.linear._layer import LOGITS_DTYPE, in_one_dtype, validate_layer, validate_logits_dtype, wide_logits

EXAMPLE = "torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.eye(2), torch.ones(2, 2)"
_OPERANDS = (
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? target_weight, "
    "Tensor? target_bias, Tensor? keep, float temperature=1.0, float beta=0.5, bool wide=False"
)


def _all_logits(x, weight, bias, keep, compute):
    """All logits of a layer, for the definition. If weight is None, x holds logits."""
    if keep is not None:  # select before arithmetic: NaN * 0 is NaN
        x = torch.where(keep.unsqueeze(-1), x, 0)
    if weight is None:
        return x
    logits = matmul(x.to(compute), weight.to(compute))
    return logits if bias is None else logits + bias.to(compute)


def _empty(input, target):
    dtype, rows = compute_dtype(input.dtype, target.dtype), len(input)
    return input.new_empty(rows, dtype=dtype), input.new_empty((ROW_STATS, rows), dtype=dtype)


def _part(x, weight, bias, rows, classes, wide):
    """The logits of a slice of rows and a slice of classes. If weight is None, x holds logits."""
    if weight is None:
        return x[rows, classes]
    return logits_of(x[rows], weight[classes], None if bias is None else bias[classes], wide=wide)


class LinearDivergence(Op):
    """The record of a divergence of the logits of linear layers. Matrix products of N x D x C: in forward one per
    layer; in backward the same again, and one each for the gradients of input and linear_weight.

    The raw ops are Python code for every device: the definition would compute all logits at once.
    """

    owner = None
    differentiable = ("input", "linear_weight", "linear_bias")
    constant = ("target", "target_weight", "target_bias")
    compiled = ("cpu", "cuda")
    example = EXAMPLE

    def __init__(self, name, module, op, swap=False):
        """op: the record of the divergence of two rows of logits. swap: exchange input and target."""
        self.module, self.op, self.swap = module, op, swap
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
            composite=self._compute_backward,
        )
        super().__init__(name, forward, backward, self._define)
        self.raw, self.cpu = (), True

    def _pair(self, input, target):
        return (target, input) if self.swap else (input, target)

    def _define(
        self, input, linear_weight, linear_bias, target, target_weight, target_bias, keep, temperature=1.0, beta=0.5,
        wide=False,
    ):  # fmt: skip
        """The divergence of each row. Logits are in fp32 here, also if not wide."""
        compute = compute_dtype(input.dtype, target.dtype)
        layers = (input, linear_weight, linear_bias), (target, target_weight, target_bias)
        logits = [_all_logits(*layer, keep, compute) for layer in layers]
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
        everything = slice(None)
        size = max(1, _rows.rows_at_once(*layer[:2], wide=wide) // 2)
        with without_autocast(layer[0]):
            for part in blocks(len(layer[0]), size):
                own, other = (_part(*x, part, everything, wide) for x in (layer, teacher))
                yield part, self._pair(own, other), None if keep is None else keep[part]

    def _compute_backward(
        self, grad, row_stats, input, linear_weight, linear_bias, target, target_weight, target_bias, keep, temperature,
        beta, wide, *needs, **finish,
    ):  # fmt: skip
        """The backward in chunks of the classes. The divergence's backward op computes each chunk's slopes. finish: for
        `products`."""
        compute, everything = compute_dtype(input.dtype, grad.dtype), slice(None)
        keep = torch.ones_like(grad, dtype=torch.bool) if keep is None else keep
        x, grad = torch.where(keep.unsqueeze(1), input, 0), torch.where(keep, grad, 0)
        # a bound of each row's |slope|: a slope is p times (a logarithm minus its mean, row_stats[4] or row_stats[5])
        largest = grad.double().abs() * (2 + row_stats[4].abs() + row_stats[5].abs()) / temperature
        scale = scale_of(x, linear_weight, largest)
        grad = (grad if scale is None else grad * scale).to(compute)

        def slopes(logits, part):
            other = _part(target, target_weight, target_bias, everything, part, wide)
            needed = self._pair(True, False)
            both = self.op.backward(grad, *self._pair(logits, other), row_stats, keep, temperature, beta, *needed)
            return both[self.swap]

        return products(x, linear_weight, linear_bias, keep, slopes, scale, compute, needs, wide, **finish)

    def prepare(self, *operands):
        return True, operands

    def validate(self, *arguments):
        """Nothing to do: the public function has validated its arguments."""

    def validate_options(self, name, reduction, empty, *options):
        """Check the options of a module's constructor."""
        *options, logits_dtype = options
        validate_options(name, reduction, empty, *options)
        validate_logits_dtype(name, logits_dtype)

    def gradients(self, grad, needs, operands, results):
        return self.backward(grad, results.row_stats, *operands, *needs[:3])


# ---- for the public functions


def linear_divergence(
    op, input, linear_weight, target, target_weight, linear_bias, target_bias, mask, weight, reduction, denominator,
    empty, temperature, logits_dtype, beta=0.5,
):  # fmt: skip
    """Validate the arguments, compute the divergences of the rows with `op`, and reduce them."""
    name = op.name
    validate_layer(name, input, linear_weight, linear_bias)
    wide = wide_logits(name, logits_dtype, input, linear_weight, linear_bias)
    operands = {"input": input, "linear_weight": linear_weight, "target": target, "target_weight": target_weight}
    rows, classes = input.shape[:-1], len(linear_weight)
    if target_weight is None:
        check.floating(name, "target", target)
        if target_bias is not None:
            raise TypeError(f"{name}: target_bias needs target_weight")
        if target.shape != (*rows, classes):
            raise ValueError(
                f"{name}: target {check.shown(target)} must have logits of linear_weight's {classes} classes for each "
                f"of input's rows {check.shown(input, rows)}, or come with target_weight"
            )
    else:
        validate_layer(name, target, target_weight, target_bias, ("target", "target_weight", "target_bias"))
        if target.shape[:-1] != rows or len(target_weight) != classes:
            raise ValueError(
                f"{name}: target {check.shown(target)} and target_weight {check.shown(target_weight)} must have "
                f"input's rows {check.shown(input, rows)} and linear_weight's {classes} classes"
            )
        target, target_weight, target_bias = in_one_dtype(target, target_weight, target_bias)
    validate(name, rows, mask, weight, reduction, denominator, empty, **operands)
    validate_options(name, reduction, empty, temperature, beta)
    input, linear_weight, linear_bias = in_one_dtype(input, linear_weight, linear_bias)
    keep = kept(mask, weight)
    exists = None if keep is None else keep.expand(rows)
    layers = (input, linear_weight, linear_bias), (target, target_weight, target_bias)
    if check.mesh(input) is None:  # (a DTensor keeps its dims, any of which may be sharded)
        # (no product of the rows' sizes: it would bind the sizes that an exported program takes)
        layers = [(x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0), *rest) for x, *rest in layers]
        exists = None if exists is None else exists.reshape(-1)
    (x, *layer), (y, *teacher) = layers
    loss = op.call(x, *layer, y, *teacher, exists, as_float(temperature), as_float(beta), wide).reshape(rows)
    return finish(name, loss, keep, weight, reduction, denominator, empty)


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
    + LOGITS_DTYPE.replace("half operands", "half operands, the teacher's too,")
    + ROW_ARGUMENTS
    + """
    Raises:
        TypeError: an operand is not floating, dtypes of a layer differ, `mask` is not bool, an option is of another
            type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, a number out of range.
"""
)

"""Losses of rows: one op returns each row's loss, another the mean or sum of all rows.

The raw op of `RowLoss` returns a loss per row, which `safeops.core.loss_reduction.reduce` reduces. The raw op of
`ReducedRowLoss` returns the mean or sum of all rows from one launch, on devices that have its kernel.
"""

from torch.compiler import is_compiling

from safeops.core import sums
from safeops.core.loss_reduction import reduce
from safeops.core.op import Op, registry
from safeops.core.route import PLAIN


class RowLoss(Op):
    """The record of a loss per row. reduced: the record of their mean or sum, if the op has such a kernel."""

    parts = sums.ALL

    def __init__(self, name, forward, backward, define, *reduced):
        """reduced: the forward and backward raw ops of `ReducedRowLoss`, or nothing."""
        super().__init__(name, forward, backward, define)
        if reduced:
            self.reduced = ReducedRowLoss(self, *reduced)
            self.parts = (self.reduced, *sums.ALL)

    def losses(self, *operands):
        """Returns (losses, keep) or (losses, keep, weights), each of the rows' shape. keep: bool, True for rows that a
        mean counts; None: all. weights: a mean divides by their sum; a tensor without elements means no weights."""
        return self.definition(*operands)

    def gradients(self, grad, needs, operands, results):
        return self.gradients_of(self.backward, (grad,), needs, operands, *results)

    def gradients_of(self, backward, upstream, needs, operands, *numbers):
        """The gradients for both records. backward: the raw op of `RowLoss` or `ReducedRowLoss`. upstream: its first
        arguments, (gradient,) or (gradient, denominator). numbers: the saved results that it reads."""
        raise NotImplementedError

    def differentiated(self, *operands):
        return self.losses(*operands)[0]


class ReducedRowLoss(Op):
    """The record of the mean or sum of the rows' losses. Its kernel reads and reduces the rows in one launch for
    forward and one for backward. Without that kernel, `rows`, the `RowLoss`, runs, and `reduce` reduces its losses.

    Its operands are those of `rows`, then `mean` and `empty_nan`. It has the name of `rows`, so that errors name the
    loss; `rows` is the one that stays in the registry."""

    def __init__(self, rows, forward, backward):
        self.rows, self.differentiable = rows, rows.differentiable
        self.constant, self.linear = rows.constant, rows.linear
        super().__init__(rows.name, forward, backward, self.define)
        self.cuda, registry[rows.name] = rows.cuda, rows

    def serves(self, input, other, reduction, denominator, empty):
        """True if a call may run this op. The operands have not been validated yet."""
        if type(input) not in PLAIN or not (self.cpu and self.rows.cpu if input.is_cpu else input.is_cuda):
            return False
        if is_compiling() or reduction == "none" or denominator is not None or empty == "raise":
            return False
        runs = input.is_cpu or self.rows.cuda[input.get_device()]
        return runs and type(other) in PLAIN and other.numel() > 0 and input.numel() > 0

    def prepare(self, *arguments):
        takes, operands = self.rows.prepare(*arguments[:-2])
        defaults = self.rows.defaults[len(operands) :]
        return takes, (*operands, *defaults, *arguments[-2:]) if operands else ()

    def validate(self, *arguments):
        self.rows.validate(*arguments[:-2])

    def validate_operands(self, *operands):
        self.rows.validate_operands(*operands[:-2])

    def define(self, *operands):
        *operands, mean, empty_nan = operands
        loss, keep, *weights = self.rows.losses(*operands)
        weights, empty = next((w for w in weights if w.numel()), None), "nan" if empty_nan else "zero"
        return reduce(self.name, loss, keep, weights, "mean" if mean else "sum", None, empty)

    def gradients(self, grad, needs, operands, results):
        *operands, mean, _ = operands
        denominator, *numbers = results
        upstream = grad, denominator if mean else None
        return self.rows.gradients_of(self.backward, upstream, needs, operands, *numbers)

"""Losses of rows that a kernel reduces as well.

The raw ops give the loss of each row, which `safeops.core.loss_reduction.reduce` sums up; on a GPU one of `OfRows`
gives the mean or sum of all rows at once.
"""

from torch.compiler import is_compiling

from safeops.core import sums
from safeops.core.loss_reduction import reduce
from safeops.core.op import Op, registry
from safeops.core.route import PLAIN


class RowLoss(Op):
    """The losses of rows; `of_rows` reduces them."""

    parts = sums.ALL

    def __init__(self, name, forward, backward, define, *of_rows):
        """of_rows: the raw ops of `OfRows`, where the op has them."""
        super().__init__(name, forward, backward, define)
        if of_rows:
            self.of_rows = OfRows(self, *of_rows)
            self.parts = (self.of_rows, *sums.ALL)

    def losses(self, *operands):
        """(the loss of each row, which rows a mean counts or None, weights that it divides by, if there are any)"""
        return self.definition(*operands)

    def gradients(self, grad, needs, operands, results):
        return self.gradients_of(self.backward, (grad,), needs, operands, *results)

    def gradients_of(self, backward, upstream, needs, operands, *numbers):
        """backward: the raw op, of the rows' losses or of their reduction, which takes `upstream` first."""
        raise NotImplementedError

    def differentiated(self, *operands):
        return self.losses(*operands)[0]


class OfRows(Op):
    """The mean or sum of a loss of rows by the kernel that reads them, in one launch a direction, for a device that has
    it; elsewhere the rows' losses are reduced by an op of their own.

    Its operands are those of the rows' record, `mean` and `empty_nan`. It bears that record's name, which takes its
    place in the registry: what fails is the loss."""

    def __init__(self, rows, forward, backward):
        self.rows, self.differentiable = rows, rows.differentiable
        self.constant, self.linear = rows.constant, rows.linear
        super().__init__(rows.name, forward, backward, self.define)
        self.cuda, registry[rows.name] = rows.cuda, rows

    def serves(self, input, other, reduction, denominator, empty):
        """True if a call takes this op. Its operands have not been checked yet."""
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

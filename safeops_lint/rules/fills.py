"""SO207: fill values that half cannot hold, and softmax of rows that are masked out whole."""

import math

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.masks import of_itself
from safeops_lint.rules.squares import in_half, through
from safeops_lint.tables import SHAPING

HALF_MAX = 65504


class LargeFill(Rule):
    code, name = "SO207", "fill-before-softmax"
    what = """`masked_fill(mask, -1e9)` raises in fp16, which ends at 65504; with -inf, a row that is masked out whole
    is NaN, and so is every gradient."""
    why = """softmax of nothing but -inf is 0 / 0. A sequence of padding alone, or a query that may see no key, is
    enough. `p * log(p)` of such a row is 0 * -inf in the gradient, whatever replaces it later."""
    fix = """`safeops.masked_softmax(scores, ~hidden)`: zeros for such a row. `safeops.masked_fill(scores, hidden,
    -1e9)` saturates to the dtype. `safeops.xlogy(p, p)` for `p * log(p)`."""
    rewrites = """`softmax(x.masked_fill(hidden, -inf), dim)` to `safeops.masked_softmax(x, ~hidden, dim)`, where hidden
    is a condition on x and so has its shape (masked_softmax takes none that is larger); other fills to
    `safeops.masked_fill`"""
    ops = ("masked_fill", "softmax", "log_softmax", "mul")

    def operation(self, op, walk):
        if op.name == "mul":
            self._times(op, walk)
            self._entropy(op, walk)
        else:
            (self._fill if op.name == "masked_fill" else self._softmax)(op, walk)

    def _times(self, op, walk):
        """Report (1 - mask.to(scores.dtype)) * -1e9, which is added to scores: the product is -inf in fp16."""
        for factor, other in zip((op.input, *op.args), (*op.args, op.input)):
            value, made = walk.number(factor), walk.op(other)
            inverted = made is not None and made.name == "sub" and walk.number(made.input) == 1 and made.args
            if value is not None and HALF_MAX < abs(value) < math.inf and inverted and in_half(made.args[0], walk):
                message = f"times 1 this is {'-' * (value < 0)}inf in fp16, and a row of nothing else NaN"
                walk.report(self, op.node, f"{message}; use safeops.masked_softmax")

    def _fill(self, op, walk):
        value = walk.number(op.arg(1, "value"))
        if value is None or not HALF_MAX < abs(value) < math.inf or walk.value(op.input).wide or walk.scope.wide:
            return
        fix = None
        if not op.inplace and len(op.args) + len(op.kwargs) == 2:
            parts = ", ".join(walk.argument(n) for n in (op.input, op.arg(0, "mask"), op.arg(1, "value")))
            fix = [(op.node, f"safeops.masked_fill({parts})")]
        walk.report(self, op.node, f"{value:g} does not fit fp16 (it raises there); safeops.masked_fill saturates", fix)

    def _entropy(self, op, walk):
        """Report p * log(p) if log(p) is a log_softmax of scores filled with -inf: 0 * -inf is NaN, also in backward if
        the NaN is replaced afterwards."""
        for n in (op.input, *op.args):
            made = through(n, walk)
            fill = self._filled(made.input, walk) if made is not None and made.name == "log_softmax" else None
            if fill is not None and fill.name == "masked_fill" and self._infinite(fill, walk):
                message = "0 * -inf is NaN where it is masked, as is its gradient; use safeops.xlogy(p, p)"
                walk.report(self, op.node, message)
                return

    def _softmax(self, op, walk):
        fill = self._filled(op.input, walk)
        if fill is None or not self._infinite(fill, walk):
            return
        mask = fill.input if fill.name == "where" else fill.arg(0, "mask")
        if any("causal" in name or "tri" in name for name in walk.names_in(mask)):
            return  # a causal mask keeps an element of every row
        fix = None
        inline = fill.name == "masked_fill" and fill.node is op.input and not fill.inplace and not op.inplace
        dim = op.arg(0, "dim")
        # torch's masked_fill takes a mask that is larger than the scores; masked_softmax does not.
        fits = inline and of_itself(mask, fill.input, walk)
        if fits and dim is not None and len(op.args) + len(op.kwargs) == 1:
            text = walk.argument(mask) if isinstance(mask, cst.Call) else f"({walk.argument(mask)})"
            text = f"safeops.masked_{op.name}({walk.argument(fill.input)}, ~{text}, dim={walk.text(dim)})"
            fix = [(op.node, text)]
        message = f"a row that is masked out whole is NaN; use safeops.masked_{op.name}"
        walk.report(self, op.node, message, fix)

    def _infinite(self, fill, walk):
        """True if the fill value is -inf."""
        values = fill.args[-2:] if fill.name == "where" else [fill.arg(1, "value")]
        return any(walk.number(value) == -math.inf for value in values)

    def _filled(self, node, walk, depth=0):
        """Returns the Op, a masked_fill or a where, that filled an operand of an expression such as
        `(scores + bias) / t`; else None."""
        op = walk.op(node)
        if op is None or depth > 4:
            return None
        if op.name in ("masked_fill", "where"):
            return op
        parts = [op.input] if op.name in ("div", "mul", *SHAPING) else [op.input, *op.args] if op.name == "add" else []
        return next((f for n in parts if n is not None and (f := self._filled(n, walk, depth + 1))), None)


RULES = (LargeFill,)

"""SO207: fills before a softmax."""

import math

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.rules.divisions import in_half
from safeops.lint.rules.squares import through, wide
from safeops.lint.syntax import number
from safeops.lint.tables import SHAPING
from safeops.lint.uses import filled_later

HALF_MAX = 65504
LIKE = {"ones_like", "zeros_like", "one_hot"}


def _is_dtype(node):
    """`x.dtype`"""
    return isinstance(node, cst.Attribute) and node.attr.value == "dtype"


class LargeFill(Rule):
    code, name = "SO207", "fill-before-softmax"
    what = """
    `masked_fill(mask, -1e9)` raises in fp16, which ends at 65504; with -inf, a row that is masked out whole is NaN,
    and so is every gradient.
    """
    why = """
    softmax of nothing but -inf is 0 / 0. A sequence of padding alone, or a query that may see no key, is enough. A
    factor of 1e5 is inf in half, as is 1e10 that is cast to it or written through an index. `p * log(p)` of such a row
    is 0 * -inf in the gradient, whatever replaces it later.
    """
    fix = """
    `safeops.masked_softmax(scores, ~hidden)`: zeros for such a row. `safeops.masked_fill(scores, hidden, -1e9)`
    saturates to the dtype.
    """
    outcome = "a row that is hidden whole is NaN"
    rewrites = """
    `softmax(x.masked_fill(hidden, -inf), dim)` to `safeops.masked_softmax(x, ~hidden, dim)`, and other fills to
    `safeops.masked_fill`
    """
    bad = """
    def attention(scores: torch.Tensor, hidden: torch.Tensor):
        return F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    """
    good = """
    def attention(scores: torch.Tensor, hidden: torch.Tensor):
        return safeops.masked_softmax(scores, ~hidden, dim=-1)
    """
    ops = ("to", "type_as", "masked_fill", "softmax", "log_softmax", "logsumexp", "mul", "add", "sub")
    events = ("store",)

    def visit(self, event, node, walk):
        target, statement = node
        value = walk.number(statement.value) if isinstance(statement, cst.Assign) else None
        base = walk.value(target.value)
        wide_ = walk.scope.wide or base.wide or base.host or base.constant or base.guessed
        if base.tensor and value is not None and HALF_MAX < abs(value) < float("inf") and not wide_:
            message = f"{value:g} is {'-' * (value < 0)}inf in fp16; safeops.masked_fill saturates"
            walk.report(self, target, message, likely=False)

    def operation(self, op, walk):
        if op.name == "masked_fill":
            self._fill(op, walk)
        elif op.name in ("to", "type_as"):
            self._cast(op, walk)
        elif op.name == "mul":
            self._times(op, walk)
            self._entropy(op, walk)
        elif op.name in ("add", "sub"):
            for n in (op.input, *op.args):  # scores + 1e5 * same, of whatever that is
                if isinstance(n, cst.BinaryOperation) and not walk.value(n).tensor and not wide(op, walk):
                    self._beyond(n, [walk.number(n.left), walk.number(n.right)], walk)
        else:
            self._softmax(op, walk)

    def _fill(self, op, walk):
        value = walk.number(op.arg(1, "value"))
        if value is None or not HALF_MAX < abs(value) < float("inf") or walk.value(op.input).wide or walk.scope.wide:
            return
        fix = None
        mask = op.arg(0, "mask")
        if not op.inplace and len(op.args) + len(op.kwargs) == 2:
            parts = ", ".join(walk.argument(n) for n in (op.input, mask, op.arg(1, "value")))
            fix = [(op.node, f"safeops.masked_fill({parts})")]
        walk.report(self, op.node, f"{value:g} does not fit fp16 (it raises there); safeops.masked_fill saturates", fix)

    def _cast(self, op, walk):
        """`torch.tensor([1e10]).to(x)`: as x is half, it is inf."""
        value = walk.number(op.input) if walk.value(op.input).constant else None
        like = any(walk.value(n).tensor for n in op.args) or any(_is_dtype(n) for n in (*op.args, *op.kwargs.values()))
        if value is not None and HALF_MAX < abs(value) < math.inf and like and not wide(op, walk):
            walk.report(
                self, op.node, f"{value:g} is inf in fp16, and times 0 NaN; a bound that half holds, or .float()"
            )

    def _entropy(self, op, walk):
        """p * log(p) where log(p) is log_softmax of -inf: 0 * -inf, also in the gradient of what replaces it."""
        for n in (op.input, *op.args):
            made = through(n, walk)
            fill = self._filled(made.input, walk) if made is not None and made.name == "log_softmax" else None
            if (
                fill is not None
                and fill.name == "masked_fill"
                and self._lowest(fill.arg(1, "value"), walk) == -math.inf
            ):
                walk.report(self, op.node, "0 * -inf is NaN where it is masked; fill with 0 before the product")
                return

    def _times(self, op, walk):
        """scores + (1 - mask) * -1e9, which is -inf in fp16."""
        for factor, other in ((op.input, op.args[0] if op.args else None), (op.args[0] if op.args else None, op.input)):
            value = walk.number(factor)
            beyond = value is not None and HALF_MAX < abs(value) < float("inf")
            if not beyond or wide(op, walk) or walk.value(other).foreign or self._boolean(other, walk):
                continue
            made = walk.op(other)
            alike = made is not None and (made.name in LIKE or made.name in ("eye", "ones") and "dtype" in made.kwargs)
            mask = made.args[0] if self._complement(other, walk) else other
            if walk.value(other).mask or alike or mask is not other:
                message = f"times 1 this is {'-' * (value < 0)}inf in fp16, and a row of nothing else NaN"
                message += "; use safeops.masked_softmax"
                walk.report(self, op.node, message, likely=bool(alike or in_half(mask, walk)))

    def _boolean(self, node, walk):
        """A number times booleans is fp32."""
        inverted = isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.BitInvert)
        return inverted or walk.value(node).mask == "bool"

    def _beyond(self, node, values, walk):
        if isinstance(node.operator, cst.Multiply) and walk.training and None in values:
            if any(value is not None and HALF_MAX < abs(value) < float("inf") for value in values):
                walk.report(self, node, "times 1 this is inf in fp16, and inf - inf NaN; use safeops.masked_fill")

    def _complement(self, node, walk):
        """`1 - adjacency`"""
        op = walk.op(node)
        return op is not None and op.name == "sub" and number(op.input) == 1

    def _softmax(self, op, walk):
        fill = self._filled(op.input, walk)
        if fill is None:
            return
        values = fill.args[-2:] if fill.name == "where" else [fill.arg(1, "value")]
        low = -HALF_MAX if fill.name == "where" and not wide(op, walk) else -float("inf")  # masked_fill raises
        if not any(self._lowest(v, walk) < low or self._lowest(v, walk) == -float("inf") for v in values):
            return
        if self._causal(fill, walk):
            return
        fix = None
        inline = fill.name == "masked_fill" and fill.node is op.input and not fill.inplace and not op.inplace
        dim = op.arg(0, "dim")
        if inline and dim is not None and len(op.args) + len(op.kwargs) == 1:
            mask = fill.arg(0, "mask")
            text = walk.argument(mask)
            text = text if isinstance(mask, (cst.Name, cst.Call, cst.Attribute, cst.Subscript)) else f"({text})"
            text = f"safeops.masked_{op.name}({walk.argument(fill.input)}, ~{text}, dim={walk.text(dim)})"
            fix = [(op.node, text)]
        result = "-inf" if op.name == "logsumexp" else "NaN"
        # -inf is a sum of nothing; what is filled later has a gradient of 0 there, too
        likely = op.name != "logsumexp" and not filled_later(walk.body, op.node)
        message = f"a row that is masked out whole is {result}; use safeops.masked_{op.name}"
        walk.report(self, op.node, message, fix, likely=likely)

    def _filled(self, node, walk, depth=0):
        """The fill in `(scores + bias) / t` with either of them filled."""
        op = walk.op(node)
        if op is None or depth > 4:
            return None
        if op.name in ("masked_fill", "where"):
            return op
        parts = [op.input] if op.name in ("div", "mul", *SHAPING) else [op.input, *op.args] if op.name == "add" else []
        return next((f for n in parts if n is not None and (f := self._filled(n, walk, depth + 1))), None)

    def _lowest(self, node, walk):
        """The number that a fill is, or a tensor of it: `-9e15 * torch.ones_like(x)`; 0 where it is another."""
        op = walk.op(node) if node is not None else None
        scaled = op is not None and op.name == "mul"
        values = [walk.number(n) for n in (node, *((op.input, *op.args) if scaled else ()))]
        made = walk.number(getattr(walk.value(node), "node", None)) if node is not None else None
        return min((value for value in (made, *values) if value is not None), default=0)

    def _causal(self, fill, walk):
        """Under a causal mask every row keeps its own element."""
        mask = fill.input if fill.name == "where" else fill.arg(0, "mask")
        ops = [walk.op(mask)] if mask is not None else []
        for _ in range(3):
            if any(op is not None and op.name in ("tril", "triu") for op in ops):
                return True
            ops = [walk.op(op.input) for op in ops if op is not None and op.input is not None]
        return mask is not None and any("causal" in n or "tri" in n for n in walk.names_in(mask))


RULES = (LargeFill,)

"""SO207: fills before a softmax."""

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.rules.squares import wide
from safeops.lint.syntax import number

HALF_MAX = 65504


class LargeFill(Rule):
    code, name = "SO207", "fill-before-softmax"
    what = """
    `masked_fill(mask, -1e9)` raises in fp16, which ends at 65504; with -inf, a row that is masked out whole is NaN,
    and so is every gradient.
    """
    why = """
    softmax of nothing but -inf is 0 / 0. A sequence of padding alone, or a query that may see no key, is enough.
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
    ops = ("masked_fill", "softmax", "log_softmax", "mul")

    def operation(self, op, walk):
        if op.name == "masked_fill":
            self._fill(op, walk)
        elif op.name == "mul":
            self._times(op, walk)
        else:
            self._softmax(op, walk)

    def _fill(self, op, walk):
        value = number(op.arg(1, "value")) if op.arg(1, "value") is not None else None
        if value is None or not HALF_MAX < abs(value) < float("inf") or walk.value(op.input).wide or walk.scope.wide:
            return
        fix = None
        mask = op.arg(0, "mask")
        if not op.inplace and len(op.args) + len(op.kwargs) == 2:
            parts = ", ".join(walk.text(n) for n in (op.input, mask, op.arg(1, "value")))
            fix = [(op.node, f"safeops.masked_fill({parts})")]
        walk.report(self, op.node, f"{value:g} does not fit fp16 (it raises there); safeops.masked_fill saturates", fix)

    def _times(self, op, walk):
        """scores + (1 - mask) * -1e9: -inf in fp16, and -inf * 0 is NaN."""
        for factor, other in ((op.input, op.args[0] if op.args else None), (op.args[0] if op.args else None, op.input)):
            value = number(factor) if factor is not None else None
            if (
                value is not None
                and abs(value) > HALF_MAX
                and value < 0
                and walk.value(other).mask
                and not wide(op, walk)
            ):
                walk.report(self, op.node, f"{value:g} is -inf in fp16, and times 0 NaN; use safeops.masked_softmax")

    def _softmax(self, op, walk):
        fill = walk.op(op.input)
        if fill is None or fill.name not in ("masked_fill", "where"):
            return
        values = fill.args[-2:] if fill.name == "where" else [fill.arg(1, "value")]
        if not any(self._infinite(v, walk) for v in values if v is not None) or self._causal(fill, walk):
            return
        fix = None
        inline = fill.name == "masked_fill" and fill.node is op.input and not fill.inplace and not op.inplace
        dim = op.arg(0, "dim")
        if inline and dim is not None and len(op.args) + len(op.kwargs) == 1:
            mask = fill.arg(0, "mask")
            text = walk.text(mask)
            text = text if isinstance(mask, (cst.Name, cst.Call, cst.Attribute, cst.Subscript)) else f"({text})"
            text = f"safeops.masked_{op.name}({walk.text(fill.input)}, ~{text}, dim={walk.text(dim)})"
            fix = [(op.node, text)]
        walk.report(self, op.node, f"a row that is masked out whole is NaN; use safeops.masked_{op.name}", fix)

    def _infinite(self, node, walk):
        """-inf, as a number or as a tensor of it."""
        op = walk.op(node)
        made = [*op.args, op.input] if op is not None and op.name in ("tensor", "full", "full_like", "new_full") else []
        return any(n is not None and number(n) == float("-inf") for n in (node, *made))

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

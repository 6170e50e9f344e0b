"""SO105: products of a mask and a tensor that may have NaN or inf."""

import re

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.bounds import BOUNDED, SELECTED, fills_inf, finite
from safeops_lint.rules.domains import unsafe

KEPT = {"log", "log2", "log10", "xlogy", "masked_fill", "where"}  # give -inf in forward, not only a bad gradient
VALID = re.compile(r"(^|_|is)(in)?valid|nan$|finite$", re.IGNORECASE)  # masks of elements that may be NaN


class TimesMask(Rule):
    code, name = "SO105", "times-mask"
    what = "`x * mask` does not remove what it masks: NaN * 0 and inf * 0 are NaN, in the value and in the gradient."
    why = """The masked-out places are those most likely to hold garbage: unmeasured targets, log of 0, 0 / 0. It is
    told of what a logarithm or a fill by -inf made and of masks that say what is finite; where the rule is asked for,
    of roots, quotients and masks of what is valid."""
    fix = """`safeops.masked_fill(x, ~mask, 0)`, or hand the mask over: `safeops.masked_sum(x, mask)`,
    `safeops.masked_mean(x, mask)`."""
    rewrites = "`x * mask` to `safeops.masked_fill(x, ~mask, 0)` where the mask is certainly boolean"
    ops = ("mul",)

    def operation(self, op, walk):
        if len(op.args) != 1 or walk.scope.no_grad or walk.scope.metric or not walk.stepping:
            return
        left, right = walk.value(op.input), walk.value(op.args[0])
        for x, mask, x_node, mask_node in ((left, right, op.input, op.args[0]), (right, left, op.args[0], op.input)):
            if mask.mask is None or not x.tensor or x.mask or x.constant or x.integer:
                continue
            if mask.mask == "likely" and not mask.tensor or mask.constant:
                continue  # a constant, such as 1 - torch.eye(n)
            if finite(x_node, walk, cleaned=True):
                continue
            edge = _edge(x_node, walk)
            if edge is None and not _of_validity(mask_node, walk):
                continue
            what = f"what this {edge} gives at its edge" if edge else "what is not valid"
            fix = None
            if mask.mask == "bool" and not op.inplace and isinstance(op.node, (cst.BinaryOperation, cst.Call)):
                fix = [(op.node, f"safeops.masked_fill({walk.argument(x_node)}, {_inverted(mask_node, walk)}, 0)")]
            message = f"times a mask keeps {what}: NaN * 0 and inf * 0 are NaN; use safeops.masked_fill"
            names = walk.names_in(mask_node) | walk.names_in(walk.value(mask_node).node)
            likely = edge in KEPT if edge else any(n.endswith(("nan", "finite", "isinf")) for n in names)
            walk.report(self, op.node, message, fix, likely=likely)
            return


def _edge(node, walk, depth=0):
    """Returns the name of an operation (log, sqrt, div) that can make a value or its gradient NaN or inf; else None."""
    op = walk.op(node)
    if fills_inf(op, walk):
        return op.name
    filled = isinstance(node, cst.Name) and node.value in walk.scope.filled
    if op is None or depth > 8 or filled or op.name in SELECTED | BOUNDED | {"exp"}:
        return None
    if unsafe(op, walk) or op.name != "div" and any(walk.reported("SO206", n) for n in (op.node, op.input)):
        return op.name
    operands = [n for n in (op.input, *op.args) if n is not None and walk.value(n).tensor]
    return next((name for n in operands if (name := _edge(n, walk, depth + 1))), None)


def _of_validity(node, walk):
    """True if, by its name, a mask says which elements have a valid value: `target.isfinite()`, `valid`."""
    names = walk.names_in(node) | walk.names_in(walk.value(node).node or node)
    return any(VALID.search(name) for name in names)


def _inverted(mask, walk):
    """Returns the source text of `~mask`."""
    if isinstance(mask, cst.UnaryOperation) and isinstance(mask.operator, cst.BitInvert):
        return walk.argument(mask.expression)
    return f"~{walk.text(mask)}" if _tight(mask) else f"~({walk.text(mask)})"


def _tight(node):
    return bool(getattr(node, "lpar", ())) or isinstance(node, (cst.Name, cst.Call, cst.Attribute, cst.Subscript))


RULES = (TimesMask,)

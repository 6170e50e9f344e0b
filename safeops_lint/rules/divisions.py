"""SO202: divisions by a count, a norm, a sum or a spread that can be 0."""

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.squares import extreme, in_half, normalized, squared, through
from safeops_lint.syntax import number
from safeops_lint.tables import REDUCTIONS, SHAPING

# what made the divisor -> what to use
USE = dict.fromkeys("sum mean nansum nanmean count_nonzero".split(), "safeops.masked_mean or safeops.safe_div")
USE["norm"] = "safeops.normalize or safeops.safe_div"
KEEPS_ZERO = SHAPING | set("sqrt pow square neg abs index".split())


def reduction(node, walk, depth=0):
    """The name of the reduction that an expression is, or is made of alone: max - min, a norm times a norm; or None."""
    op = walk.op(node)
    if op is None or depth > 8:
        return None
    if op.name in REDUCTIONS:
        return op.name
    operands = [n for n in (op.input, *op.args) if n is not None and walk.value(n).tensor]
    if op.name in KEEPS_ZERO | {"div"}:
        operands = operands[:1]
    elif op.name not in ("add", "sub", "mul"):
        return None
    made = [reduction(n, walk, depth + 1) for n in operands]
    return made[0] if made and all(made) else None


def divisor(op):
    """The divisor of an operation, or None."""
    if op.name == "reciprocal":
        return op.input
    return op.args[-1] if len(op.args) == 1 + (op.name == "addcdiv") else None


def often_zero(node, walk):
    """True if a divisor is a norm or a spread, which is 0 of a zero vector or a constant row, or a mask's count."""
    op = through(node, walk, KEEPS_ZERO)
    if op is None:
        return False
    if op.name in ("add", "sub", "mul"):  # max - min, a norm times a norm
        operands = [n for n in (op.input, *op.args) if walk.value(n).tensor]
        return walk.value(op.input).tensor and all(often_zero(n, walk) or extreme(n, walk) for n in operands)
    if op.name in ("sum", "nansum", "mean", "count_nonzero"):
        base = squared(op.input, walk)  # of errors it is 0 only where the fit is perfect
        norm = base is not None and op.name == "sum" and getattr(through(base, walk), "name", "") != "sub"
        return norm or walk.value(op.input).mask is not None
    return op.name in ("norm", "std", "var")


class DivisionByReduction(Rule):
    code, name = "SO202", "division-by-count-or-norm"
    widens = True
    ops = ("div", "reciprocal", "addcdiv")
    what = """A division by a count, a norm, a sum or a spread that can be 0: 0 / 0 is NaN, and one NaN is every
    weight's gradient."""
    why = """A batch without a valid element, a zero vector or a constant row comes sooner or later. In half, a count
    beyond 65504 is inf too."""
    fix = """`safeops.masked_mean` for a count, `safeops.normalize` for a norm, else `safeops.safe_div(a, b)`; or
    `clamp(min=...)` on the divisor."""
    rewrites = """`a / b` to `safeops.safe_div(a, b)`, `1 / b` to `safeops.safe_reciprocal(b)`, `x / x.norm(dim=d,
    keepdim=True)` to `safeops.normalize(x, dim=d)`; where b is 0 the result is 0"""

    def operation(self, op, walk):
        node = divisor(op)
        by = walk.value(node) if node is not None and walk.computing else None
        if by is None or not by.tensor or by.positive or by.constant or walk.checked(node):
            return
        made = reduction(node, walk)
        if made is None:
            return
        use = USE.get(made, "safeops.safe_div")
        message, fix = f"nothing keeps this count, norm or spread away from 0; use {use}", self._fix(op, walk)
        if made == "sum" and in_half(walk.op(node) and walk.op(node).input, walk):
            message = "this count is inf in half beyond 65504, and 0 for an empty mask; use safeops.masked_mean"
            fix = None  # another division leaves the count what it is
        walk.report(self, op.node, message, fix, likely=often_zero(node, walk))

    def _fix(self, op, walk):
        if op.name != "div" or op.inplace or op.kwargs or isinstance(op.node, cst.AugAssign):
            return None
        by = walk.argument(op.args[0])
        if number(op.input) == 1:
            return [(op.node, f"safeops.safe_reciprocal({by})")]
        if not walk.value(op.input).tensor:
            return None
        dim = normalized(op.input, op.args[0], walk)
        if dim is not None:
            return [(op.node, f"safeops.normalize({walk.argument(op.input)}, dim={dim})")]
        return [(op.node, f"safeops.safe_div({walk.argument(op.input)}, {by})")]


RULES = (DivisionByReduction,)

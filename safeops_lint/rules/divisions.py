"""SO202: divisions by a count, a norm, a sum or a spread that can be 0."""

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.bounds import finite
from safeops_lint.rules.masks import of_itself
from safeops_lint.rules.squares import dims, extreme, in_half, squared, through
from safeops_lint.syntax import number
from safeops_lint.tables import REDUCTIONS, SHAPING

# reduction that made the divisor -> the function of safeops to use
USE = dict.fromkeys("sum mean nansum nanmean count_nonzero".split(), "safeops.masked_mean or safeops.safe_div")
USE["norm"] = "safeops.normalize or safeops.safe_div"
COUNTS = "counts the elements of x, mask.sum() those of mask"
MASKED = f"use safeops.masked_mean(x, mask), or mask= of the loss: it {COUNTS}"
KEEPS_ZERO = SHAPING | set("sqrt pow square neg abs index".split())


def reduction(node, walk, depth=0):
    """Returns the name of the reduction that made an expression. If the expression combines only reductions (max - min,
    a norm times a norm), the name of the first; else None."""
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
    """Returns the divisor of a div, reciprocal or addcdiv; None if the operation lacks one."""
    if op.name == "reciprocal":
        return op.input
    return op.args[-1] if len(op.args) == 1 + (op.name == "addcdiv") else None


def often_zero(node, walk):
    """True if a divisor is often 0: a norm (0 for a zero vector), a spread (0 for a constant row), or the count of a
    mask."""
    op = through(node, walk, KEEPS_ZERO)
    if op is None:
        return False
    if op.name in ("add", "sub", "mul"):  # max - min, a norm times a norm
        operands = [n for n in (op.input, *op.args) if walk.value(n).tensor]
        return walk.value(op.input).tensor and all(often_zero(n, walk) or extreme(n, walk) for n in operands)
    if op.name in ("sum", "nansum", "mean", "count_nonzero"):
        base = squared(op.input, walk)  # a sum of squared errors is 0 only if the fit is perfect: not often
        norm = base is not None and op.name == "sum" and getattr(through(base, walk), "name", "") != "sub"
        return norm or walk.value(op.input).mask is not None
    return op.name in ("norm", "std", "var")


def masked_factor(node, walk, depth=0):
    """Finds a product x * mask, inside of sums, where x may have NaN, which the sum keeps for any divisor. Returns (its
    Op, x, mask), else None."""
    op = walk.op(node)
    if op is None or depth > 8:
        return None
    if op.name == "mul" and len(op.args) == 1:
        for x, mask in ((op.input, op.args[0]), (op.args[0], op.input)):
            if walk.value(mask).mask and walk.value(x).tensor and not finite(x, walk, cleaned=True):
                return op, x, mask
    operands = (op.input, *op.args) if op.name in ("add", "sub", "mul", "div", "neg") else (op.input,)
    followed = op.name in SHAPING | {"add", "sub", "mul", "div", "neg", "sum", "float"}
    made = (masked_factor(n, walk, depth + 1) for n in operands if n is not None and followed)
    return next((result for result in made if result), None)


class DivisionByReduction(Rule):
    code, name = "SO202", "division-by-count-or-norm"
    widens = True
    ops = ("div", "reciprocal", "addcdiv")
    events = ("Call",)
    what = """A division by a count, a norm, a sum or a spread that can be 0: 0 / 0 is NaN, and one NaN is every
    weight's gradient."""
    why = """A batch without a valid element, a zero vector or a constant row comes sooner or later. In half, a count
    beyond 65504 is inf too."""
    fix = """`safeops.masked_mean` for a count, `safeops.normalize` for a norm, else `safeops.safe_div(a, b)`; or
    `clamp(min=...)` on the divisor. masked_mean counts the elements of x that are kept; `mask.sum()` counts those of a
    mask that broadcasts once, so that the quotient is larger."""
    rewrites = """`a / b` to `safeops.safe_div(a, b)`, `1 / b` to `safeops.safe_reciprocal(b)`; where b is 0 the
    result is 0. `(x * mask).sum() / mask.sum()` to
    `safeops.masked_mean(x, mask, dtype=x.dtype)`, where the mask is a condition on x and so has its shape; else it is
    left alone"""

    def operation(self, op, walk):
        node = divisor(op)
        by = walk.value(node) if node is not None and walk.computing else None
        if by is None or not by.tensor or by.positive or by.constant or walk.checked(node):
            return
        made = reduction(node, walk)
        if made is None:
            return
        use, count = USE.get(made, "safeops.safe_div"), walk.op(node)
        if count is not None and count.name == "sum" and walk.value(count.input).mask:
            use = f"safeops.safe_div or safeops.masked_mean(x, mask), which {COUNTS}"
        message, fix = f"nothing keeps this count, norm or spread away from 0; use {use}", self._fix(op, walk)
        if masked_factor(op.input, walk):
            message = f"nothing keeps this divisor away from 0, and NaN times a mask is NaN; {MASKED}"
        if made == "sum" and in_half(count and count.input, walk):
            message = f"this count is inf in half beyond 65504, and 0 for an empty mask; {MASKED}"
            fix = None  # safe_div would not change the count
        walk.report(self, op.node, message, fix, likely=often_zero(node, walk))

    def visit(self, event, node, walk):
        """Report safeops.safe_div of a sum of x * mask: it handles a count of 0, but not NaN in masked-out elements."""
        if walk.imports.resolve(node.func) != "safeops.safe_div" or not node.args or not walk.computing:
            return
        factor = masked_factor(node.args[0].value, walk)
        if factor and not walk.reported("SO105", factor[0].node):
            walk.report(self, node, f"the sum keeps what it masks: NaN * 0 is NaN; {MASKED}")

    def _fix(self, op, walk):
        if op.name != "div" or op.inplace or op.kwargs or isinstance(op.node, cst.AugAssign):
            return None
        if factor := masked_factor(op.input, walk):
            return self._mean(op, *factor, walk)
        by = walk.argument(op.args[0])
        if number(op.input) == 1:
            return [(op.node, f"safeops.safe_reciprocal({by})")]
        if not walk.value(op.input).tensor:
            return None
        return [(op.node, f"safeops.safe_div({walk.argument(op.input)}, {by})")]

    def _mean(self, op, product, x, mask, walk):
        """Returns the fix that makes the quotient a masked_mean, if the mask is a condition on x and so has its shape;
        else None. (The count of a mask that broadcasts is another one.)"""
        total, count = walk.op(op.input), walk.op(op.args[0])
        inline = total.node is op.input and total.input is product.node and count.node is op.args[0]
        if not inline or not total.name == count.name == "sum" or not of_itself(mask, x, walk):
            return None
        rest = dims(total, walk)
        if rest is None or rest != dims(count, walk) or walk.argument(count.input) != walk.argument(mask):
            return None
        name, mask = walk.text(x), walk.argument(mask)
        return [(op.node, f"safeops.masked_mean({name}, {mask}{rest[0]}, dtype={name}.dtype)")]


RULES = (DivisionByReduction,)

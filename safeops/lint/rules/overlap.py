"""SO210: ratios of sums that overflow half."""

import re

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.rules.exponents import exponent_range
from safeops.lint.rules.squares import squared, tensors, through, wide
from safeops.lint.syntax import dotted, number
from safeops.lint.tables import SHAPING


def sums_of_products(node, walk, depth=0):
    """The Ops that sum a product of two tensors, among the terms of an expression."""
    op = through(node, walk)
    if op is None or depth > 8 or walk.value(node).wide:
        return []
    if op.name in ("einsum", "dot", "vdot", "inner", "tensordot"):
        return [op]
    if op.name == "sum" and "dtype" not in op.kwargs:
        product = through(op.input, walk)
        if product is None or product.name not in ("mul", "minimum"):
            return []
        factors = tensors(product, walk)
        if any(_less_its_maximum(f, walk) for f in factors):
            return []
        inner = [found for f in factors for found in sums_of_products(f, walk, depth + 1)]
        if inner:
            return inner
        same = len(factors) == 2 and walk.text(factors[0]) == walk.text(factors[1])  # squares are SO201's
        return [op] if len(factors) == 2 and not same else []
    if op.name in ("add", "sub", "mul", "neg", "clamp"):
        return [found for n in tensors(op, walk) for found in sums_of_products(n, walk, depth + 1)]
    return []


def _less_its_maximum(node, walk):
    """Whether it is an exponential of what is less its maximum."""
    exp = through(node, walk)
    return exp is not None and exp.name == "exp" and exponent_range(exp, walk) is not None


def is_sum(node, walk, depth=0):
    """A sum of elements, or of such sums."""
    op = through(node, walk)
    if op is None or depth > 8 or walk.value(node).wide:
        return False
    if op.name in ("sum", "count_nonzero"):
        return "dtype" not in op.kwargs
    parts = tensors(op, walk)
    if op.name == "sub" and not walk.value(op.input).tensor:  # 1 - |x|^2 of what lies in the unit ball
        return False
    return op.name in ("add", "sub") and bool(parts) and all(is_sum(n, walk, depth + 1) for n in parts)


def of_squares(node, walk):
    total = through(node, walk)
    return total is not None and squared(total.input, walk) is not None


CORNERS = re.compile(r"(x|y)_?(1|2|min|max)$")
ENDS = {"1": "2", "min": "max"}
EXTREMES = {"max", "maximum", "min", "minimum"}


def area(op, walk):
    """Whether two sides of a box are multiplied: `(b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])`, `wh[:, 0] * wh[:, 1]`."""
    sides = {_side(n, walk) for n in (op.input, op.args[0])}
    return len(sides) == 2 and None not in sides


def _side(node, walk):
    """Which side of a box it is; None where it is none."""
    made = through(node, walk, SHAPING | {"clamp", "clamp_min", "relu", "add"})
    if made is None or made.name != "sub" or len(made.args) != 1 or walk.value(node).integer:
        index, base = _last(node)
        corners = walk.op(base) if index is not None else None
        corners = corners and through(base, walk, SHAPING | {"clamp", "clamp_min", "relu", "add"})
        ends = [walk.op(n) for n in (corners.input, *corners.args)] if corners and corners.name == "sub" else []
        met = [end.name for end in ends if end is not None and end.name in EXTREMES]
        return index if len(met) == 2 else None  # of an intersection
    ends = [_last(n) for n in (made.input, made.args[0])]
    if None not in (ends[0][0], ends[1][0]):
        same = walk.text(ends[0][1]) == walk.text(ends[1][1])
        return ends[1][0] if same and ends[0][0] == ends[1][0] + 2 else None
    names = [CORNERS.search(dotted(n) or "") for n in (made.input, made.args[0])]
    if None in names or names[0][1] != names[1][1] or ENDS.get(names[1][2]) != names[0][2]:
        return None
    return "xy".index(names[0][1])


def _last(node):
    """(2, b) of `b[..., 2]`"""
    part = node.slice[-1].slice if isinstance(node, cst.Subscript) else None
    index = number(part.value) if isinstance(part, cst.Index) else None
    return (index, node.value) if isinstance(index, int) else (None, None)


class Overlap(Rule):
    code, name = "SO210", "overlap-in-half"
    what = """
    A ratio of sums over a segmentation (Dice, Tversky, IoU, MCC) in half: beyond 65504 pixels a sum is inf, and the
    ratio NaN, or 0 with no gradient.
    """
    why = """
    `sum` of half adds in fp32 and rounds to half: 256 x 256 pixels that agree are inf. The product of two counts
    overflows at 256 each, and so does that of a box's sides in pixels (told where the rule is asked for).
    """
    fix = """
    `safeops.dice_loss`, `safeops.tversky_loss`: sums in fp32, half read as it is. Or `.float()` before the product.
    """
    outcome = "the loss is 1 and its gradient 0 for a perfect prediction of 300 x 300 pixels in fp16"
    bad = """
    def dice_loss(p, t):
        overlap = (p * t).sum()
        return 1 - (2 * overlap + 1) / ((p + t).sum() * 2 + 1)
    """
    good = """
    def dice_loss(p, t):
        return safeops.dice_loss(p, t)
    """
    ops = ("div", "mul")

    def operation(self, op, walk):
        if len(op.args) != 1 or wide(op, walk):
            return
        if op.name == "mul" and area(op, walk):
            message = "the area of a box of 256 x 256 pixels is inf in fp16; .float() first"
            walk.report(self, op.node, message, likely=False)  # anchors make most boxes fp32
            return
        if not walk.computing:
            return
        if op.name == "mul":
            if walk.text(op.input) != walk.text(op.args[0]) and all(is_sum(n, walk) for n in (op.input, op.args[0])):
                covers = [(self.code, n) for n in (op.input, op.args[0])]
                message = "a product of two sums overflows half at 256 each; use .float() first"
                norms = any(of_squares(n, walk) for n in (op.input, op.args[0]))  # hardly 256, and fp32 by autocast
                walk.report(self, op.node, message, covers=covers, likely=walk.casts_to_half or not norms)
            return
        over = through(op.args[0], walk, SHAPING | {"clamp", "clamp_min"})
        if over is None or over.name not in ("add", "sub") or self._sums(op.args[0], walk) < 2:
            return
        for found in sums_of_products(op.input, walk):
            message = "a sum of products in half is inf beyond 65504, and the ratio wrong; use safeops.dice_loss"
            message += ", safeops.tversky_loss or .float() first"
            walk.report(self, found.node, message, likely=not walk.half_by_autocast)

    def _sums(self, node, walk, depth=0):
        """How many sums there are in a divisor; one of a sum of two counts as two."""
        op = through(node, walk)
        if op is None or depth > 8:
            return 0
        if op.name in ("sum", "einsum"):
            inner = walk.op(op.input)
            return 2 if op.name == "sum" and inner is not None and inner.name in ("add", "maximum") else 1
        parts = tensors(op, walk) if op.name in ("add", "sub", "mul", "clamp", "clamp_min", "pow") else []
        return sum(self._sums(n, walk, depth + 1) for n in parts)


RULES = (Overlap,)

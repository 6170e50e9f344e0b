"""SO210: ratios of sums that overflow half."""

from safeops_lint.rule import Rule
from safeops_lint.rules.exponentials import exponentials
from safeops_lint.rules.squares import squared, tensors, through, wide
from safeops_lint.tables import SHAPING


def sums_of_products(node, walk, depth=0):
    """Returns the Ops, among the terms and factors of an expression, that sum a product of two tensors."""
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
        same = len(factors) == 2 and walk.text(factors[0]) == walk.text(factors[1])  # SO201 reports squares
        return [op] if len(factors) == 2 and not same else []
    if op.name in ("add", "sub", "mul", "neg", "clamp"):
        return [result for n in tensors(op, walk) for result in sums_of_products(n, walk, depth + 1)]
    return []


def is_sum(node, walk, depth=0):
    """True for a sum over elements, or for an addition of such sums."""
    op = through(node, walk)
    if op is None or depth > 8 or walk.value(node).wide:
        return False
    if op.name in ("sum", "count_nonzero"):
        return "dtype" not in op.kwargs
    parts = tensors(op, walk)
    return op.name == "add" and bool(parts) and all(is_sum(n, walk, depth + 1) for n in parts)


class Overlap(Rule):
    code, name = "SO210", "overlap-in-half"
    what = """A ratio of sums over a segmentation (Dice, Tversky, IoU, MCC) in half: beyond 65504 pixels a sum is inf,
    and the ratio NaN, or 0 with no gradient."""
    why = """`sum` of half adds in fp32 and rounds to half: 256 x 256 pixels that agree are inf. The product of two
    counts overflows at 256 each."""
    fix = """`safeops.dice_loss`, `safeops.tversky_loss`: sums in fp32, half read as it is. Or `.float()` before the
    product."""
    ops = ("div", "mul")

    def operation(self, op, walk):
        if len(op.args) != 1 or wide(op, walk) or not walk.computing:
            return
        if op.name == "mul":
            norms = any(squared(getattr(through(n, walk), "input", None), walk) is not None for n in tensors(op, walk))
            both = (op.input, op.args[0])
            if any(exponential for n in both for exponential in exponentials(n, walk)):
                return  # exponentials also overflow wider dtypes; SO211 reports them
            if walk.text(op.input) != walk.text(op.args[0]) and all(is_sum(n, walk) for n in both):
                covers = [(self.code, n) for n in (op.input, op.args[0])]
                message = "a product of two sums overflows half at 256 each; use .float() first"
                walk.report(self, op.node, message, covers=covers, likely=not norms or walk.casts_to_half)
            return
        over = through(op.args[0], walk, SHAPING | {"clamp", "clamp_min"})
        if over is None or over.name not in ("add", "sub") or self._sums(op.args[0], walk) < 2:
            return
        for result in sums_of_products(op.input, walk):
            message = "a sum of products in half is inf beyond 65504, and the ratio wrong; use safeops.dice_loss"
            message += ", safeops.tversky_loss or .float() first"
            walk.report(self, result.node, message)

    def _sums(self, node, walk, depth=0):
        """The number of sums in a divisor; a sum of `a + b` counts as two."""
        op = through(node, walk)
        if op is None or depth > 8:
            return 0
        if op.name in ("sum", "einsum"):
            inner = walk.op(op.input)
            return 2 if op.name == "sum" and inner is not None and inner.name in ("add", "maximum") else 1
        parts = tensors(op, walk) if op.name in ("add", "sub", "mul", "clamp", "clamp_min", "pow") else []
        return sum(self._sums(n, walk, depth + 1) for n in parts)


RULES = (Overlap,)

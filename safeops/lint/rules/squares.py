"""SO201: squares that overflow half before they are summed."""

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.syntax import number


def squared(node, walk):
    """x of `x**2`, `x.pow(2)`, `x.square()`, `x * x`, through names; else None."""
    op = walk.op(node)
    if op is None or op.inplace:
        return None
    if op.name == "square" or op.name == "pow" and number(op.arg(0, "exponent")) == 2:
        return op.input
    if op.name == "mul" and len(op.args) == 1 and walk.text(op.input) == walk.text(op.args[0]):
        return op.input
    return None


def normalized(x, norm, walk):
    """The source of `dim` where `norm` is x's own norm along one dim, kept: x / norm is safeops.normalize(x, dim)."""
    op = walk.op(norm)
    if op is None or op.node is not norm or op.name != "norm" or len(op.args) > 3:
        return None
    if set(op.kwargs) - {"p", "ord", "dim", "keepdim"}:
        return None
    order, dim, keepdim = op.arg(0, "p", "ord"), op.arg(1, "dim"), op.arg(2, "keepdim")
    plain = isinstance(dim, (cst.Integer, cst.Name, cst.UnaryOperation))
    two = order is None or number(order) == 2
    if not (two and plain and keepdim is not None and walk.text(keepdim) == "True"):
        return None
    return walk.text(dim) if walk.argument(x) == walk.argument(op.input) else None


def wide(op, walk):
    return bool(walk.scope.wide or walk.value(op.node).wide)


class SquareSum(Rule):
    code, name = "SO201", "half-square-sum"
    widens = True
    what = "Squares are rounded to half before they are summed: 256^2 is inf in fp16, and below 1.7e-4 a square is 0."
    why = """
    `pow` runs in fp32 only inside CUDA autocast; a `.half()` model, CPU autocast, or a tensor that arrives in half
    squares in half.
    """
    fix = """
    `safeops.mse_loss(a, b)`, `safeops.masked_sum_of_squares(x)`, `safeops.masked_rms(x)`: half is read as it is and
    squared in fp32. Or `.float()` before the square.
    """
    outcome = "the loss is inf in fp16; the true value is 90000"
    rewrites = """
    `((a - b) ** 2).mean()` to `safeops.mse_loss(a, b)`, `(x ** 2).sum(...)` to `safeops.masked_sum_of_squares(x,
    ...)`: fp32 for half input
    """
    bad = """
    def square_loss(prediction, target):
        return ((prediction - target) ** 2).mean()
    """
    good = """
    def square_loss(prediction, target):
        return safeops.mse_loss(prediction, target)
    """
    ops = ("sum", "mean")

    def operation(self, op, walk):
        base = squared(op.input, walk)
        if (
            base is None
            or not walk.computing
            or wide(op, walk)
            or walk.value(op.input).constant
            or "dtype" in op.kwargs
        ):
            return
        walk.report(
            self,
            op.node,
            "squares in half overflow at 256; use a safeops loss or .float() first",
            self._fix(op, base, walk),
        )

    def _fix(self, op, base, walk):
        if walk.op(op.input).node is not op.input or set(op.kwargs) - {"dim", "keepdim"}:
            return None
        if op.name == "sum":
            rest = dims(op, walk)
            if walk.value(base).integer or walk.value(base).mask == "bool":
                return None
            return rest and [(op.node, f"safeops.masked_sum_of_squares({walk.argument(base)}{rest[0]})")]
        difference = base if isinstance(base, cst.BinaryOperation) and isinstance(base.operator, cst.Subtract) else None
        if difference is None or op.args or op.kwargs:
            return None
        sides = [walk.value(n) for n in (difference.left, difference.right)]
        if not all(v.tensor and not v.integer and v.mask != "bool" for v in sides):  # mse_loss takes floating tensors
            return None
        return [(op.node, f"safeops.mse_loss({walk.argument(difference.left)}, {walk.argument(difference.right)})")]


def dims(op, walk):
    """`(", dim=1, keepdim=True",)` of a reduction's arguments; None where there are others."""
    if len(op.args) > 2 or set(op.kwargs) - {"dim", "keepdim"}:
        return None
    given = {**dict(zip(("dim", "keepdim"), op.args)), **op.kwargs}
    return ("".join(f", {name}={walk.text(node)}" for name, node in given.items()),)


RULES = (SquareSum,)

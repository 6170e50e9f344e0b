"""SO201: squares that overflow half before they are summed. Also functions that other rules use."""

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.bounds import finite
from safeops_lint.rules.shapes import steps
from safeops_lint.syntax import number
from safeops_lint.tables import SHAPING


def tensors(op, walk):
    """Returns the operands of an Op that are tensors."""
    return [n for n in (op.input, *op.args) if n is not None and walk.value(n).tensor]


def through(node, walk, names=SHAPING):
    """Returns the Op that made an expression. Ops in `names` (by default those that only change the shape) are skipped:
    the Op that made their input is returned."""
    op = walk.op(node)
    for _ in range(8):
        if op is None or op.name not in names:
            break
        op = walk.op(op.input)
    return op


def extreme(node, walk):
    """True if an expression is the largest or the smallest element of a tensor."""
    op = through(node, walk)
    largest = op is not None and op.name in ("max", "amax", "min", "amin")
    return largest and not any(walk.value(n).tensor for n in op.args)


def squared(node, walk):
    """Returns x if an expression is `x**2`, `x.pow(2)`, `x.square()` or `x * x`, also through a name; else None."""
    op = walk.op(node)
    if op is None or op.inplace:
        return None
    if op.name == "square" or op.name == "pow" and number(op.arg(0, "exponent")) == 2:
        return op.input
    if op.name == "mul" and len(op.args) == 1 and walk.text(op.input) == walk.text(op.args[0]):
        return op.input
    return None


def powers(node, walk, depth=0):
    """Returns the squares and higher powers among the terms of an expression and their factors, such as (x - y)**2 in
    `w * (x - y)**2 + z`."""
    op = walk.op(node)
    if op is None or depth > 5:
        return []
    if op.name in SHAPING or op.name in ("float", "double", "type"):  # casts come after the square: too late
        return powers(op.input, walk, depth + 1)
    if squared(node, walk) is not None or op.name == "pow" and (number(op.arg(0, "exponent")) or 0) >= 2:
        return [node]
    if op.name not in ("add", "sub", "mul", "neg", "div"):
        return []
    operands = (op.input,) if op.name == "div" else (op.input, *op.args)
    return [result for n in operands for result in powers(n, walk, depth + 1)]


def in_half(node, walk):
    """True if a mask was cast to the dtype of another tensor, which may be half: `valid.to(x.dtype)`."""
    op = through(node, walk, SHAPING - {"to"})
    cast = op is not None and op.name in ("to", "type_as", "type") and not walk.value(node).wide
    return cast and walk.value(node).mask is not None


def wide(op, walk):
    return bool(walk.scope.wide or walk.value(op.node).wide)


class SquareSum(Rule):
    code, name = "SO201", "half-square-sum"
    widens = True
    what = "Squares are rounded to half before they are summed: 256^2 is inf in fp16, and below 1.7e-4 a square is 0."
    why = """`pow` runs in fp32 only inside CUDA autocast; a `.half()` model, CPU autocast, or a tensor that arrives in
    half squares in half."""
    fix = """`safeops.mse_loss(a, b)`, `safeops.masked_sum_of_squares(x)`, `safeops.masked_rms(x)`: half is read as it
    is and squared in fp32. Or `.float()` before the square."""
    rewrites = """`((a - b) ** 2).mean()` to `safeops.mse_loss(a, b)`, where a and b get their shapes in one way
    (mse_loss warns where they broadcast), `(x ** 2).sum(...)` to `safeops.masked_sum_of_squares(x, ...)`: fp32 for
    half input"""
    ops = ("sum", "mean", "sqrt")

    def operation(self, op, walk):
        if walk.scope.wide or "dtype" in op.kwargs:
            return
        if not walk.training:
            return
        message = "squares in half overflow at 256; use a safeops loss or .float() first"
        for node in powers(op.input, walk):
            base = walk.op(node).input
            if walk.value(node).constant or walk.value(node).wide or finite(base, walk):
                continue
            likely = walk.casts_to_half  # else half comes from autocast alone, which computes pow in fp32
            if op.name != "sqrt" and walk.op(node) is through(op.input, walk, SHAPING | {"float", "double"}):
                fix = self._fix(op, base, walk) if node is op.input and squared(node, walk) is not None else None
                walk.report(self, op.node, message, fix, likely=likely)
            elif getattr(through(base, walk, {"abs"}), "name", "") == "sub":  # the square of a difference
                walk.report(self, op.node if op.name == "sqrt" else walk.op(node).node, message, likely=likely)

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
        if steps(difference.left, walk) != steps(difference.right, walk):  # mse_loss warns where they broadcast
            return None
        return [(op.node, f"safeops.mse_loss({walk.argument(difference.left)}, {walk.argument(difference.right)})")]


def dims(op, walk):
    """Returns a reduction's arguments as a text for another call, in a tuple: `(", dim=1, keepdim=True",)`. None if it
    has arguments besides dim and keepdim."""
    if len(op.args) > 2 or set(op.kwargs) - {"dim", "keepdim"}:
        return None
    given = {**dict(zip(("dim", "keepdim"), op.args)), **op.kwargs}
    return ("".join(f", {name}={walk.argument(node)}" for name, node in given.items()),)


RULES = (SquareSum,)

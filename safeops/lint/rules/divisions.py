"""SO202 and SO203: divisions by what can be 0."""

import re

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.rules.bounds import PRODUCTS
from safeops.lint.rules.squares import PARAMETER, extreme, normalized, squared, through
from safeops.lint.syntax import dotted, number
from safeops.lint.tables import REDUCTIONS, SHAPING
from safeops.lint.uses import COMPARED, no_gradient

USE = {  # what made the divisor -> what to use
    **dict.fromkeys(("norm",), "safeops.normalize or safeops.safe_div"),
    **dict.fromkeys(("sum", "mean", "nansum", "nanmean", "count_nonzero"), "safeops.masked_mean or safeops.safe_div"),
}

LENGTHS = re.compile(r"(^|_)(len|lens|lengths?)$", re.IGNORECASE)  # of sequences: 1 at least
OF_SEQUENCES = re.compile(r"(^|_)(attention|attn|padding|pad|output|src|tgt|seq\w*|token|text|[xyz])_mask$")  # as these
TARGET = re.compile(r"(^|_)(targets?|labels?|gt|truth|y_true|true)$", re.IGNORECASE)
MEANS = ("cross_entropy", "nll_loss")  # a mean over the targets that are not ignore_index
ZEROS = {"bincount", "histc", "sin", "det"}  # no reductions, but 0 as easily: of a class that is absent, at 0


def reduction(node, walk, depth=0):
    """The name of the reduction that an expression is, or is made of alone: max - min, a norm times a norm; or None."""
    op = walk.op(node)
    if op is None or depth > 8:
        return None
    if op.name in REDUCTIONS | ZEROS:
        return op.name
    operands = [n for n in (op.input, *op.args) if n is not None and walk.value(n).tensor]
    if op.name in SHAPING | {"sqrt", "pow", "square", "neg", "abs", "div", "index"}:
        operands = operands[:1]
    elif op.name not in ("add", "sub", "mul"):
        return None
    made = [reduction(n, walk, depth + 1) for n in operands]
    return made[0] if made and all(made) else None


def divisor(op):
    """What an operation divides by, or None: of `x.reciprocal()` x, of addcdiv(a, b, c) c."""
    if op.name == "reciprocal":
        return op.input
    if op.name == "addcdiv":
        return op.args[1] if len(op.args) > 1 else None
    return op.args[0] if len(op.args) == 1 else None


def given(node, walk, relative):
    """Whether a divisor is the target of a relative error, or the square of what nothing keeps away from 0."""
    op = walk.op(node)
    if op is not None and op.name in SHAPING | {"abs"}:
        return given(op.input, walk, relative)
    if op is None:
        name = dotted(node) or ""
        return relative and walk.training and bool(TARGET.search(name)) and name in walk.scope.arguments
    if op.name == "mul" and any(not walk.value(n).tensor for n in (op.input, op.args[0])):
        return any(given(n, walk, relative) for n in (op.input, op.args[0]) if walk.op(n) is not None)
    base = squared(node, walk) if walk.training and not walk.scope.helper else None
    used = base is not None and walk.names_in(base) & walk.scope.used
    return bool(used) and walk.value(base).op is None and not walk.value(base).positive


def _asked(node, walk):
    """Whether a condition asked about another name for the same: `n = m.sum()`, `if n == 0`, `x / m.sum()`."""
    made = walk.value(node).node or node
    known = (walk.scope.get(name).node for name in walk.scope.checked)
    return any(other is not None and walk.text(other) == walk.text(made) for other in known)


def often_zero(node, walk):
    """Whether a divisor is a norm or a spread, which a zero vector or a constant row makes 0, or a count in half, which
    is inf beyond 65504: whether a mask may be empty, and of other sums, only the data tell."""
    op = through(node, walk, SHAPING | {"sqrt", "pow", "square", "neg", "abs", "index"})
    if op is None:
        return False
    if op.name in ("add", "sub", "mul"):  # max - min, a norm times a norm
        operands = [n for n in (op.input, *op.args) if walk.value(n).tensor]
        return walk.value(op.input).tensor and all(often_zero(n, walk) or extreme(n, walk) for n in operands)
    base = squared(op.input, walk) if op.name == "sum" else None
    # (a sum of squared errors is 0 only where the fit is perfect)
    spelled = base is not None and getattr(through(base, walk), "name", "") != "sub"
    counts = spelled or op.name in ("sum", "nansum") and in_half(op.input, walk)
    product = op.name == "norm" and getattr(through(op.input, walk), "name", "") in PRODUCTS
    order = op.arg(0, "p", "ord") if op.name == "norm" else None
    frobenius = order is not None and "fro" in walk.text(order)
    dims = op.arg(op.name == "norm", "dim", "axis")
    of_matrix = product or frobenius or len(getattr(dims, "elements", ())) > 1
    learned = op.name == "norm" and PARAMETER.search(dotted(op.input) or "")
    return (counts or op.name in ("norm", "std", "var")) and not (of_matrix or learned)


def in_half(node, walk):
    """Whether a mask was cast to the dtype of something else: `valid.to(x.dtype)`."""
    op = through(node, walk, SHAPING - {"to"})
    cast = op is not None and op.name in ("to", "type_as", "type") and not walk.value(node).wide
    return cast and walk.value(node).mask is not None


class _Division(Rule):
    ops = ("div", "reciprocal", "addcdiv", "log", "log2", "log10")

    def operation(self, op, walk):
        if op.name.startswith("log"):  # log(1 / 0) is inf, as of a PSNR; of 0, which safe_div makes of it, -inf
            quotient = walk.reports.get((self.code, id(getattr(walk.op(op.input), "node", None))))
            if quotient is not None:
                quotient.fix = None
            return
        node = divisor(op)
        if node is None or not walk.computing:
            return
        by = walk.value(node)
        if not by.tensor or by.positive or by.constant or walk.checked(node):
            return
        made = reduction(node, walk) or ("target" if given(node, walk, walk.value(op.input).tensor) else None)
        if (made is not None) != self.of_reductions:
            return
        names = walk.names_in(node) | walk.names_in(by.node or node)  # also of `n = mask.sum()`
        filled = made in ("sum", "mean") and any(OF_SEQUENCES.search(name) for name in names)
        if _asked(node, walk) or filled or any(LENGTHS.search(name) for name in names):
            return
        message = self.message.format(use=USE.get(made, "safeops.safe_div"))
        fix = self._fix(op, walk)
        if made == "sum" and in_half(walk.op(node) and walk.op(node).input, walk):
            message = "this count is inf in half beyond 65504, and 0 for an empty mask; use safeops.masked_mean"
            fix = None  # another division leaves the count what it is
        if made == "target":
            message = "this divisor may be 0, a target or a square that is 0 in half below 2e-4; use safeops.safe_div"
        likely = self.of_reductions and often_zero(node, walk) and not walk.imports.measures  # NaN is "no value" there
        likely = likely and not no_gradient(walk.body, op.node, COMPARED)
        walk.report(self, op.node, message, fix, likely=likely)

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


class DivisionByReduction(_Division):
    code, name = "SO202", "division-by-count-or-norm"
    widens = True
    of_reductions = True
    ops = (*_Division.ops, *MEANS)
    message = "nothing keeps this count, norm or spread away from 0; use {use}"
    what = """
    A division by a count, a norm, a sum or a spread that can be 0: 0 / 0 is NaN, and one NaN is every weight's
    gradient.
    """
    why = """
    A zero vector or a constant row comes sooner or later; so do, told where the rule is asked for, a batch without a
    valid element, a target of 0 in a relative error, weights that are all 0, and labels that are all `ignore_index`.
    In half, a count beyond 65504 is inf too.
    """
    fix = """
    `safeops.masked_mean` for a count, `safeops.normalize` for a norm, else `safeops.safe_div(a, b)`; or
    `clamp(min=...)` on the divisor.
    """
    outcome = "the loss and its gradient are NaN when nothing is valid"

    def operation(self, op, walk):
        if op.name not in MEANS:
            super().operation(op, walk)
        elif walk.training and "ignore_index" in op.kwargs and "reduction" not in op.kwargs:
            walk.report(self, op.node, "the mean over no target is NaN; use safeops.cross_entropy", likely=False)

    rewrites = """
    `a / b` to `safeops.safe_div(a, b)`, `1 / b` to `safeops.safe_reciprocal(b)`, `x / x.norm(dim=d, keepdim=True)`
    to `safeops.normalize(x, dim=d)`; where b is 0 the result is 0
    """
    bad = """
    def count_loss(error, mask):
        return (error.abs() * mask).sum() / mask.sum()
    """
    good = """
    def count_loss(error, mask):
        return safeops.masked_mean(error.abs(), mask)
    """


class DivisionByTensor(_Division):
    code, name = "SO203", "division-by-tensor"
    default = False
    of_reductions = False
    message = "nothing keeps this divisor away from 0; use safeops.safe_div"
    what = "A division by a tensor that nothing in sight keeps away from 0."
    why = """
    x / 0 is inf and its gradient NaN. Which divisors can be 0 only the author knows: hence not in the default set.
    """
    fix = "`safeops.safe_div(a, b, eps=...)`: 0 with gradient 0 where b is below eps."
    outcome = "the gradient is NaN where the divisor is 0"
    rewrites = "as SO202"
    bad = """
    def ratio_loss(x, y):
        return (x / y).abs().mean()
    """
    good = """
    def ratio_loss(x, y):
        return safeops.safe_div(x, y).abs().mean()
    """


RULES = (DivisionByReduction, DivisionByTensor)

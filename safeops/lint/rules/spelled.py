"""SO211: formulas of exponentials that are right on paper, where no float holds the parts."""

import re

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.rules.bounds import BOUNDED, finite
from safeops.lint.rules.domains import sources
from safeops.lint.rules.squares import tensors, through, wide
from safeops.lint.syntax import descendants, dotted
from safeops.lint.tables import SHAPING


class Spelled(Rule):
    code, name = "SO211", "exponential-in-logarithm"
    what = """
    `log(1 + exp(x))`, `log(exp(x).sum())`, `log(cosh(x))`, `exp(x) / exp(x).sum()` and its logarithm: exp overflows
    fp16 at 11.1 and fp32 at 88.7, where the whole is about x, or 1.
    """
    why = "inf goes into the logarithm, and inf / inf is NaN; far below, exp is 0 and its logarithm -inf."
    fix = """
    `F.softplus(x)`, `torch.logsumexp(x, dim)`, `safeops.log_cosh_loss(x, y)`, `torch.softmax(x, dim)`,
    `F.log_softmax(x, dim)`.
    """
    outcome = "the loss is inf in fp16 at 12"
    bad = """
    def margin_loss(score):
        return torch.log(1 + torch.exp(score)).mean()
    """
    good = """
    def margin_loss(score):
        return F.softplus(score).mean()
    """
    ops = ("log", "log1p", "log2", "log10", "div")

    def operation(self, op, walk):
        if op.name == "div":
            if len(op.args) == 1 and not wide(op, walk) and self._normalized(op, walk):
                message = "exp overflows fp16 at 11.1, and inf / inf is NaN; use torch.softmax"
                self._report(op, message, [("SO202", op.node)], walk)
            return
        if not (walk.training or walk.scope.is_module and walk.scope.name == "forward"):
            return
        use = self._use(op, walk)
        if use is not None:
            problem = "exp overflows fp16 at 11.1 where this logarithm does not"
            if use.startswith("-"):
                use, problem = use[1:], "exp is 0 in fp16 below -17, and the logarithm of nothing but these -inf"
            covers = [("SO204", op.node), ("SO211", getattr(walk.op(op.input), "node", None))]
            self._report(op, f"{problem}; use {use}", covers, walk)

    def _report(self, op, message, covers, walk):
        """What it covers is not hidden from a default run that would tell it."""
        covers += [("SO213", n) for n in descendants(op.node)]
        covered = (walk.reports.get((code, id(node))) for code, node in covers)
        likely = _may_be_large(op, walk) or any(report and report.likely for report in covered)
        walk.report(self, op.node, message, covers=covers, likely=likely)

    def _use(self, op, walk):
        inner = through(op.input, walk)
        if inner is None:
            return None
        here = any(n is inner.node for n in descendants(op.input))  # by way of a name, another branch may have made it
        bounded = exponent_range(inner, walk) or inner.name == "cosh" and SCORES.search(walk.text(inner.input))
        if here and inner.name in ("cosh", "exp") and op.name != "log1p" and not bounded:
            return "safeops.log_cosh_loss" if inner.name == "cosh" else "the argument of exp"
        if op.name == "log1p" and inner.name == "exp":
            return None if exponent_range(inner, walk) else "F.softplus"
        if inner.name == "sub" and not walk.value(inner.input).tensor:  # log(1 - exp(-x)) is of x > 0 alone
            return None
        if inner.name in ("add", "sub"):
            return "F.softplus or torch.logsumexp" if self._grows(inner, walk) else None
        if inner.name in ("sum", "mean", "cumsum"):
            use = "torch.logcumsumexp" if inner.name == "cumsum" else "torch.logsumexp"
            exp = through(inner.input, walk)
            if self._grows(exp, walk):
                return use
            below = exp is not None and exp.name == "exp" and exponent_range(exp, walk) == "below"
            return "-" + use if below else None
        if inner.name == "div" and self._normalized(inner, walk):
            return "F.log_softmax"
        return None

    def _normalized(self, op, walk):
        """exp(x) / exp(x).sum(), or the part of a sum over it."""
        return self._grows(through(op.input, walk), walk) and self._has_sum(op.args[0], walk)

    def _grows(self, op, walk, depth=0):
        """An exponential that may overflow, or a sum with one in it."""
        if op is None or depth > 4:
            return False
        if op.name == "exp":
            return exponent_range(op, walk) is None
        if op.name in ("add", "sub"):
            return any(self._grows(through(n, walk), walk, depth + 1) for n in tensors(op, walk))
        return op.name in ("sum", "cumsum") and self._grows(through(op.input, walk), walk, depth + 1)

    def _has_sum(self, node, walk, depth=0):
        """Whether an expression adds exponentials up."""
        op = through(node, walk)
        if op is None or depth > 5:
            return False
        if op.name in ("sum", "cumsum"):
            return self._grows(op, walk) or any(exponentials(op.input, walk))
        return any(self._has_sum(n, walk, depth + 1) for n in tensors(op, walk))


def exponentials(node, walk, depth=0):
    """Those in an expression, through names."""
    op = through(node, walk)
    if op is None or depth > 5:
        return
    if op.name in ("exp", "cosh"):
        yield op
    for n in tensors(op, walk):
        yield from exponentials(n, walk, depth + 1)


def _may_be_large(formula, walk):
    """Whether what the exponentials in it are of may be large: by its name, or by what divides it. Most similarities
    and distances are small."""
    for op in (found for n in tensors(formula, walk) for found in exponentials(n, walk)):
        scaled = walk.reports.get(("SO213", id(op.node)))
        names = walk.names_in(op.input) | sources(op.input, walk)
        if op.name == "cosh" or scaled and scaled.likely or any(LARGE.search(name) for name in names):
            return True
    return False


# What has no bound, by its name.
LARGE = re.compile(r"score|logit|pred|output|input|energ|hazard|risk|log_h|(^|[._])[hxyz]\d?$", re.IGNORECASE)
LARGEST = {"max", "amax", "maximum", "logsumexp", "detach"}
NOT_POSITIVE = {"logsigmoid", "log_softmax"}
BOUNDED_ABOVE = NOT_POSITIVE | {"clamp_max", "minimum"}
SCORES = re.compile(r"dice|tversky|jaccard|iou|ssim", re.IGNORECASE)  # between 0 and 1
NOT_NEGATIVE = set("abs square pow norm relu softplus cdist pdist exp sigmoid softmax var std".split())


def exponent_range(exp, walk):
    """Why an exponential cannot overflow: its argument is "below" 0, or "safe", less a maximum; None where it may."""
    chosen = isinstance(exp.input, cst.IfExp) and any("max" in name for name in walk.names_in(exp.input))
    if walk.value(exp.input).constant or chosen:
        return "safe"
    if sign_of(exp.input, walk) < 0:
        return "below"
    op, sign = walk.op(exp.input), 1
    while op is not None and (op.name in SHAPING or op.name in ("div", "mul", "neg", "index")):
        inner = op.input
        if op.name == "neg":
            sign = -sign
        elif op.name in ("div", "mul"):
            numbers = [n for n in (op.input, *op.args) if not walk.value(n).tensor]
            sign *= -1 if any(isinstance(n, cst.UnaryOperation) for n in numbers) else 1
            inner = op.args[0] if op.name == "mul" and op.args and numbers == [op.input] else op.input  # -0.5 * x
        op = walk.op(inner)
    if op is None:
        return None
    if op is through(exp.input, walk) and op.name in BOUNDED or op.name == "add" and _maximum(op, walk):
        return "safe"
    if op.name == "sub" and not op.args:  # torch.sub(x, other=y)
        return None
    if op.name == "sub" and not walk.value(op.input).tensor and sign > 0:  # 2 - abs(x)
        inner = walk.op(op.args[0])
        return "safe" if inner is not None and inner.name in NOT_NEGATIVE else None
    if op.name == "sub" and walk.value(op.args[0]).tensor and sign > 0:
        top = through(op.args[0], walk)
        named = any("max" in name for name in walk.names_in(op.args[0]))
        return "safe" if named or top is not None and top.name in LARGEST else None
    if op.name == "sub" and sign > 0 and (walk.number(op.args[0]) or 0) >= 1:  # (sigmoid(x) - y - 1) / t
        inner = walk.op(op.input)
        sides = (inner.input, *inner.args) if inner is not None and inner.name == "sub" else (op.input,)
        return "below" if any(finite(n, walk) for n in sides) else None
    if op.name == "clamp" and sign > 0 and op.arg(1, "max") is None:
        return None
    return "safe" if op.name == "clamp" or sign > 0 and op.name in BOUNDED_ABOVE else None


def _minus_abs(op, walk):
    """`torch.where(x >= 0, -x, x)`"""
    condition = walk.value(op.input).node
    if not isinstance(condition, cst.Comparison) or len(op.args) != 2:
        return False
    (asked, *_), (minus, x) = condition.comparisons, op.args
    above = isinstance(asked.operator, (cst.GreaterThan, cst.GreaterThanEqual)) and _zero(asked.comparator, walk)
    negative = isinstance(minus, cst.UnaryOperation) and isinstance(minus.operator, cst.Minus)
    return above and negative and walk.text(minus.expression) == walk.text(x) == walk.text(condition.left)


def _zero(node, walk):
    """Whether it is 0, or a tensor of zeros."""
    made = walk.op(node)
    return walk.number(node) == 0 or made is not None and made.name in ("zeros", "zeros_like")


def _maximum(op, walk):
    """`x + max_val`, where max_val is minus the maximum."""
    return any(sign_of(n, walk) < 0 and "max" in (dotted(n) or "") for n in (op.input, *op.args))


def sign_of(node, walk, depth=0):
    """1 of what is not negative, -1 of what is not positive, 0 where there is no telling."""
    value, op = walk.value(node), walk.op(node)
    if op is None:
        number = walk.number(node)
        if number is not None:
            return (number > 0) - (number < 0)
        minus = isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus)
        return -sign_of(node.expression, walk, depth) if minus else int(value.foreign and value.positive)
    if depth > 8 or op.name == "pow" and (walk.number(op.arg(0, "exponent")) or 2) % 2 == 1:
        return 0
    floor = walk.number(op.arg(0, "min")) if op.name in ("clamp", "clamp_min") else None
    if op.name in NOT_NEGATIVE or floor is not None and floor >= 0:
        return 1
    if op.name in NOT_POSITIVE or op.name == "where" and _minus_abs(op, walk):
        return -1
    of = sign_of(op.input, walk, depth + 1)
    if op.name in SHAPING | {"sum", "mean", "cumsum", "index", "float", "double"}:
        return of
    other = sign_of(op.args[0], walk, depth + 1) if op.args else 0
    signs = {"neg": -of, "mul": of * other, "div": of * other}
    signs |= {"add": of * (of == other), "sub": of * (of == -other)}
    return signs.get(op.name, 0)


RULES = (Spelled,)

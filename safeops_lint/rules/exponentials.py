"""SO211: exponentials, which half holds up to 11.1 only, in a logarithm or over their sum."""

from safeops_lint.rule import Rule
from safeops_lint.rules.squares import tensors, through, wide
from safeops_lint.tables import SHAPING

NOT_NEGATIVE = set("abs square pow norm relu softplus cdist sigmoid softmax var std".split())
BOUNDED = set("max amax maximum logsumexp detach sigmoid softmax tanh clamp clamp_max minimum where".split())


def bounded(exp, walk):
    """True if an exponential cannot overflow: its argument is at most 0, clamped, or less its maximum."""
    if walk.value(exp.input).constant or any("max" in name for name in walk.names_in(exp.input)):
        return True
    if walk.text(exp.input).lstrip("(").startswith("-"):
        inner = through(exp.input, walk, SHAPING | {"neg", "mul", "div", "sum", "mean"})
        return inner is not None and inner.name in NOT_NEGATIVE
    op = through(exp.input, walk)
    if op is not None and op.name == "sub" and op.args:
        op = through(op.args[0], walk)
    return op is not None and op.name in BOUNDED


def exponentials(node, walk, depth=0):
    """Those in an expression, through names."""
    op = through(node, walk)
    if op is None or depth > 5:
        return
    if op.name in ("exp", "cosh"):
        yield op
    for n in tensors(op, walk):
        yield from exponentials(n, walk, depth + 1)


class LogExp(Rule):
    code, name = "SO211", "exponential-in-logarithm"
    what = """`log(1 + exp(x))`, `log(exp(x).sum())`, `log(cosh(x))`, `exp(x) / exp(x).sum()` and its logarithm: exp
    overflows fp16 at 11.1 and fp32 at 88.7, where the whole is about x, or 1."""
    why = "inf goes into the logarithm, and inf / inf is NaN; far below, exp is 0 and its logarithm -inf."
    fix = """`F.softplus(x)`, `torch.logsumexp(x, dim)`, `safeops.log_cosh_loss(x, y)`, `torch.softmax(x, dim)`,
    `F.log_softmax(x, dim)`."""
    ops = ("log", "log1p", "log2", "log10", "div")

    def operation(self, op, walk):
        if op.name == "div":
            if len(op.args) == 1 and not wide(op, walk) and self._normalized(op, walk):
                message = "exp overflows fp16 at 11.1, and inf / inf is NaN; use torch.softmax"
                walk.report(self, op.node, message, covers=[("SO202", op.node)])
        elif walk.training or walk.scope.is_module and walk.scope.name == "forward":
            use = self._use(op, walk)
            if use is not None:
                covers = [("SO204", op.node), ("SO211", getattr(walk.op(op.input), "node", None))]
                message = f"exp overflows fp16 at 11.1 where this logarithm does not; use {use}"
                likely = not all(walk.value(exp.node).wide for exp in exponentials(op.input, walk))
                walk.report(self, op.node, message, covers=covers, likely=likely)

    def _use(self, op, walk):
        inner = through(op.input, walk)
        if inner is None:
            return None
        if op.name == "log1p" and inner.name == "exp":
            return None if bounded(inner, walk) else "F.softplus"
        if inner.name in ("cosh", "exp") and op.name != "log1p" and not bounded(inner, walk):
            return "safeops.log_cosh_loss" if inner.name == "cosh" else "the argument of exp"
        if inner.name == "add":
            return "F.softplus or torch.logsumexp" if self._grows(inner, walk) else None
        if inner.name in ("sum", "mean", "cumsum"):
            use = "torch.logcumsumexp" if inner.name == "cumsum" else "torch.logsumexp"
            return use if self._grows(through(inner.input, walk), walk) else None
        return "F.log_softmax" if inner.name == "div" and self._normalized(inner, walk) else None

    def _normalized(self, op, walk):
        """exp(x) / exp(x).sum(), or the part of a sum over it."""
        by = through(op.args[0], walk, SHAPING | {"add"}) if op.args else None
        summed = by is not None and by.name in ("sum", "cumsum") and any(exponentials(by.input, walk))
        return summed and self._grows(through(op.input, walk), walk)

    def _grows(self, op, walk, depth=0):
        """An exponential that may overflow, or a sum with one in it."""
        if op is None or depth > 4:
            return False
        if op.name == "exp":
            return not bounded(op, walk)
        if op.name in ("add", "sub"):
            return any(self._grows(through(n, walk), walk, depth + 1) for n in tensors(op, walk))
        return op.name in ("sum", "cumsum") and self._grows(through(op.input, walk), walk, depth + 1)


RULES = (LogExp,)

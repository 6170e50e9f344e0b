"""SO211: exponentials in a logarithm, or divided by their sum. In fp16, exp(x) is inf for x > 11.1."""

from safeops_lint.rule import Rule
from safeops_lint.rules.squares import tensors, through, wide
from safeops_lint.tables import SHAPING

NOT_NEGATIVE = set("abs square pow norm relu softplus cdist sigmoid softmax var std".split())
BOUNDED = set("max amax maximum logsumexp detach sigmoid softmax tanh clamp clamp_max minimum where".split())


def bounded(exp, walk):
    """True if an exponential cannot overflow: its argument is at most 0, or clamped, or has its maximum subtracted."""
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
    """Yield the Ops of the exponentials in an expression, also through names."""
    op = through(node, walk)
    if op is None or depth > 5:
        return
    if op.name in ("exp", "cosh"):
        yield op
    for n in tensors(op, walk):
        yield from exponentials(n, walk, depth + 1)


# For a row in which nothing is kept, it returns -inf, the logarithm of 0, with gradient 0.
MASKED = "safeops.masked_logsumexp(x.masked_fill(~mask, -math.inf), dim=dim)"
SHIFTED = "exp of x less the largest that is summed (x - x.amax())"  # the quotient does not change


class LogExp(Rule):
    code, name = "SO211", "exponential-in-logarithm"
    what = """`log(1 + exp(x))`, `log(exp(x).sum())`, `log(cosh(x))`, `exp(x) / exp(x).sum()` and its logarithm: exp
    overflows fp16 at 11.1 and fp32 at 88.7, where the whole is about x, or 1."""
    why = "inf goes into the logarithm, and inf / inf is NaN; far below, exp is 0 and its logarithm -inf."
    fix = """`F.softplus(x)`, `torch.logsumexp(x, dim)`, `safeops.masked_logsumexp(x.masked_fill(~mask, -math.inf),
    dim=dim)` where a mask multiplies exp, `safeops.log_cosh_loss(x, y)`, `torch.softmax(x, dim)`, `F.log_softmax(x,
    dim)`; of other sums (Sinkhorn) exp of x less its largest."""
    ops = ("log", "log1p", "log2", "log10", "div")

    def operation(self, op, walk):
        if op.name == "div":
            if len(op.args) == 1 and not wide(op, walk) and self._normalized(op, walk):
                use = "torch.softmax" if self._plain(op, walk) else f"the softmax, or {SHIFTED}"
                message = f"exp overflows fp16 at 11.1, and inf / inf is NaN; use {use}"
                walk.report(self, op.node, message, covers=[("SO202", op.node)])
        elif walk.training or walk.scope.is_module and walk.scope.name == "forward":
            use = self._use(op, walk)
            if use is not None:
                covers = [("SO204", op.node), ("SO211", getattr(walk.op(op.input), "node", None))]
                message = f"exp overflows fp16 at 11.1 where this logarithm does not; use {use}"
                likely = not all(walk.value(exp.node).wide for exp in exponentials(op.input, walk))
                walk.report(self, op.node, message, covers=covers, likely=likely)

    def _use(self, op, walk):
        use = self._in_torch(op, walk)
        base = op.name.removeprefix("log")
        return f"{use}, over math.log({base})" if use and base in ("2", "10") else use

    def _in_torch(self, op, walk):
        inner = through(op.input, walk)
        if inner is None:
            return None
        if op.name == "log1p" and inner.name == "exp":
            return None if bounded(inner, walk) else "F.softplus"
        if inner.name in ("cosh", "exp") and op.name != "log1p" and not bounded(inner, walk):
            return "safeops.log_cosh_loss" if inner.name == "cosh" else "the argument of exp"
        if inner.name == "add":
            products = any(through(n, walk).name == "mul" for n in tensors(inner, walk) if through(n, walk))
            use = f"F.softplus of its logarithm, {MASKED} each" if products else "F.softplus or torch.logsumexp"
            return use if self._grows(inner, walk) else None
        if inner.name in ("sum", "mean", "cumsum"):
            summed = through(inner.input, walk)
            use = {"sum": "torch.logsumexp", "mean": "torch.logsumexp - log(n)", "cumsum": "torch.logcumsumexp"}
            masked = summed is not None and summed.name == "mul"
            return (MASKED if masked else use[inner.name]) if self._grows(summed, walk) else None
        if inner.name != "div" or not self._normalized(inner, walk):
            return None
        return "F.log_softmax" if self._plain(inner, walk) else f"a difference of logarithms, {MASKED} each"

    def _plain(self, op, walk):
        """True if a quotient is a softmax: exp(x) divided by the sum of the same exp(x) along a dim, and in no loop."""
        above, by = through(op.input, walk), through(op.args[0], walk)
        once = by.name == "sum" and bool(by.args or by.kwargs) and not walk.scope.loops
        summed = once and through(by.input, walk)
        return bool(summed) and above.name == summed.name == "exp" and walk.text(above.node) == walk.text(summed.node)

    def _normalized(self, op, walk):
        """True for exp(x) / exp(x).sum(), or another expression that may overflow over a sum of exponentials."""
        by = through(op.args[0], walk, SHAPING | {"add"}) if op.args else None
        summed = by is not None and by.name in ("sum", "cumsum") and any(exponentials(by.input, walk))
        return summed and self._grows(through(op.input, walk), walk)

    def _grows(self, op, walk, depth=0):
        """True for an exponential that may overflow, or a sum, difference or product that contains one."""
        if op is None or depth > 4:
            return False
        if op.name == "exp":
            return not bounded(op, walk)
        if op.name in ("add", "sub", "mul"):
            return any(self._grows(through(n, walk), walk, depth + 1) for n in tensors(op, walk))
        return op.name in ("sum", "cumsum") and self._grows(through(op.input, walk), walk, depth + 1)


RULES = (LogExp,)

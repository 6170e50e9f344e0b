"""SO211 and SO213: exponentials, which half holds up to 11.1 only, in a logarithm or on their own."""

from safeops.lint.rule import Rule
from safeops.lint.rules.exponents import SCORES, exponent_range, exponentials, kept_small, may_be_large, scaled
from safeops.lint.rules.squares import tensors, through, wide
from safeops.lint.syntax import descendants


class LogExp(Rule):
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
        likely = may_be_large(op, walk) or any(report and report.likely for report in covered)
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


class Exponential(Rule):
    code, name = "SO213", "exponential-in-half"
    what = """
    `exp` of a similarity over a temperature, of a large number times a score, of logits, of a log-variance, or of a
    difference of log-probabilities: in fp16 it is inf beyond 11.1.
    """
    why = "1 / 0.07 is 14. A policy that moved since the samples were drawn has ratios beyond any bound."
    fix = "`.float()` before `exp`; `F.cross_entropy` of the scores; `clamp(max=10)` on a difference of logarithms."
    outcome = "the loss is inf in fp16"
    bad = """
    def contrast_loss(cosine):
        return torch.exp(cosine / 0.07).mean()
    """
    good = """
    def contrast_loss(cosine):
        return torch.exp(cosine.float() / 0.07).mean()
    """
    ops = ("exp", "pow")

    def operation(self, op, walk):
        if not (walk.scope.loss or walk.scope.step) or walk.scope.metric or wide(op, walk):
            return
        if op.name == "pow":  # decibels
            base, exponent = walk.number(op.input), op.arg(0, "exponent")
            value = walk.value(exponent)
            if base == 10 and value.tensor and not value.constant and getattr(value.op, "name", "") != "clamp":
                walk.report(self, op.node, "a power of 10 is inf in fp16 beyond 4.8; .float() first")
        elif exponent_range(op, walk) is None and scaled(op.input, walk):
            message = "exp overflows fp16 at 11.1, and this argument may be larger; .float() first"
            known = any(walk.reported("SO211", n) for n in descendants(op.input))  # the logarithm in it was told of
            walk.report(self, op.node, message, likely=not (known or kept_small(op.input, walk)))


RULES = (LogExp, Exponential)

"""SO213: exponentials of what half cannot hold."""

import re

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.rules.bounds import BOUNDED
from safeops.lint.rules.spelled import exponent_range
from safeops.lint.rules.squares import through, wide
from safeops.lint.syntax import descendants, dotted

UNBOUNDED = re.compile(r"(^|[._])(log_?(var|variance|sigma|sigma2|std|rate|scale)s?|logits?|scores?)$", re.IGNORECASE)
TEMPERATURE = re.compile(r"(^|[._])(t|tau|temp\w*|sinkhorn_eps)$", re.IGNORECASE)
COSINE_OVER = 0.1  # exp(1 / 0.1) is 22026: three of them are inf in fp16


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
        elif exponent_range(op, walk) is None and self._large(op.input, walk):
            message = "exp overflows fp16 at 11.1, and this argument may be larger; .float() first"
            known = any(walk.reported("SO211", n) for n in descendants(op.input))  # the logarithm in it was told of
            walk.report(self, op.node, message, likely=not (known or _kept_small(op.input, walk)))

    def _large(self, node, walk):
        while isinstance(node, cst.UnaryOperation):
            node = node.expression
        inner = through(node, walk)
        if UNBOUNDED.search(dotted(node) or ""):
            return inner is None or inner.name not in BOUNDED
        by = inner.args[0] if inner is not None and inner.args else None
        if inner is None or getattr(walk.op(inner.input), "name", "") == "neg":
            return False
        if inner.name == "div" and not walk.value(by).tensor:
            small = walk.number(by)
            return bool(TEMPERATURE.search(dotted(by) or "")) if small is None else 0 < small <= COSINE_OVER
        if inner.name == "mul":
            scales = (inner.input, by)
            inverse = any(re.search(r"inv\w*_(t|tau|temp\w*)$", dotted(n) or "") for n in scales)
            return inverse or any((walk.number(n) or 0) >= 1 / COSINE_OVER for n in scales)
        names = [walk.names_in(n) - {"self", "torch"} for n in (inner.input, by)] if inner.name == "sub" else []
        return bool(names) and all(any("log" in name for name in side) for side in names)


def _kept_small(node, walk):
    """Whether it is by how much a policy has moved since it was sampled, which is little while it is clipped; or the
    logarithm of a variance, which the loss itself pulls to 0."""
    names = walk.names_in(node) | walk.names_in(walk.value(node).node or node)
    return any(re.search(r"(^|_)old(_|$)|ratio|log_?(var|std|scale|sigma)", name) for name in names)


RULES = (Exponential,)

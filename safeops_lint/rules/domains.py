"""SO204: functions at the edge of their domain: log and sqrt of 0, acos of 1."""

import re

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.squares import through
from safeops_lint.syntax import dotted, number
from safeops_lint.tables import SHAPING

SAFE = {name: f"safe_{name}" for name in ("log", "sqrt", "rsqrt", "acos", "acosh", "asin", "pow")}
ANGLES = {"acos", "acosh", "asin", "atanh", "logit", "erfinv"}  # functions with a domain that begins or ends at 1
OPS = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow", "xlogy", *sorted(ANGLES))
ELSE = {
    "xlogy": "safeops.xlogy",
    "log2": "safeops.safe_log over math.log(2)",
    "log10": "safeops.safe_log over math.log(10)",
}
HALF_STEP = 2**-12  # half the distance between 1 and the number below it in fp16: 1 - 1e-4 rounds to 1
BOUNDED = {"clamp", "where", "masked_fill", "nan_to_num", "tanh", "minimum", "hardtanh", "mul"}
PROBABILITY = re.compile(
    r"(^|[._])(p|q|x|pt|probs?|probabilit\w*|preds?|predictions?|outputs?|inputs?|softmax|sigmoid)(_|$|\d)", re.I
)
NO_PROBABILITY = re.compile(r"_(labels?|boxes|var\w*|std|sigma|scale|dist\w*|mag\w*|spec\w*|power)(_|$|\d)", re.I)
EDGES = set("sub sigmoid softmax var relu clamp clamp_min minimum prod norm cdist".split())  # results are often 0
NO_GRAPH = re.compile(r"(^|[._])(targets?|labels?|gt|y?_?true|advantages?|returns?|rewards?|old|ref|teacher)(_|$)")


def argument(op):
    """Returns the operand that has the limited domain: the input; for xlogy(t, p), p."""
    return op.args[0] if op.name == "xlogy" and op.args else op.input


def leaves_domain(op, walk):
    """True if the operand of an operation may leave the domain: it needs a guard, and the code shows none."""
    if op.name not in OPS:
        return False
    node = argument(op)
    x = walk.value(node)
    if not x.tensor or x.constant or x.mask == "bool" or walk.checked(node):
        return False
    inner = x.op.name if x.op is not None else ""
    if op.name == "logit" and (op.args or op.kwargs):  # its eps clamps the operand
        return False
    if op.name in ANGLES:
        beyond = _above_one if op.name == "acosh" else _below_one
        return inner not in BOUNDED or beyond(node, walk) is False and not x.detached
    power = walk.number(op.arg(0, "exponent")) if op.name == "pow" else 0.5 if op.name == "sqrt" else None
    if (power or 0) > 0 and (inner == "relu" or without_graph(node, walk)):
        return False  # at 0 only the gradient is infinite, and there is none, or relu's backward writes 0 over it
    if op.name == "pow":
        return power is not None and power < 1 and power != 0 and not x.positive
    if op.name == "log1p":  # reported only as log1p(-p), which is log(1 - p)
        probability = inner == "neg" and walk.op(x.op.input)
        return bool(probability) and (probability.name in ("sigmoid", "exp") or _below_one(x.op.input, walk) is False)
    if op.name.startswith("log") and inner in ("sigmoid", "softmax"):
        return True
    if inner == "sub" and number(x.op.input) == 1 and x.op.args and _below_one(x.op.args[0], walk):
        return False
    return not x.positive


def _meets_edge(node, op, walk, depth=0):
    """True if the code shows that a value is likely to meet the edge of the domain: it is a cosine, a softmax, a
    difference, a variance, or a probability by its name. (Only the caller knows the values of other arguments.)"""
    if op.name in ANGLES:
        return True
    inner = through(node, walk, SHAPING | {"abs", "neg", "mul", "pow", "square", "sqrt", "index"})
    if inner is None or inner.name == "div":
        names = sources(node if inner is None else inner.input, walk)
        rounds = (PROBABILITY.search(name) and not NO_PROBABILITY.search(name) for name in names)
        return op.name.startswith("log") and bool(names) and all(rounds)
    if inner.name == "add" and depth < 4:
        return any(_meets_edge(n, op, walk, depth + 1) for n in (inner.input, *inner.args) if walk.value(n).tensor)
    if inner.name == "sub" and number(inner.input) == 1 and inner.args:
        given = through(inner.args[0], walk, SHAPING | {"index"}) is None  # an argument: 1 - alpha of a noise schedule
        return not given or op.name.startswith("log") or any(map(PROBABILITY.search, sources(inner.args[0], walk)))
    return inner.name in EDGES


def sources(node, walk, depth=0):
    """Returns the names of the tensors that a value was computed from."""
    op = walk.op(node)
    if op is None and isinstance(node, cst.Subscript):
        return sources(node.value, walk, depth + 1)
    if op is None or depth > 8:
        return {dotted(node) or ""}
    given = [n for n in (op.input, *op.args) if n is not None]
    operands = [n for n in given if walk.value(n).tensor and walk.value(n).mask != "bool"]
    return {name for n in operands for name in sources(n, walk, depth + 1)}


def without_graph(node, walk):
    """True if a tensor needs no gradient: it is detached, or computed from names such as `target` alone."""
    names = sources(node, walk)
    return walk.value(node).detached or bool(names) and all(NO_GRAPH.search(name) for name in names)


def unsafe(op, walk):
    """True if an operation's result or derivative can be inf or NaN: its operand may leave the domain, or its divisor
    may be 0."""
    by = op.args[0] if op.name == "div" and op.args else op.input
    if op.name not in ("div", "reciprocal"):
        return leaves_domain(op, walk)
    return walk.value(by).tensor and not (walk.value(by).positive or walk.value(by).constant or walk.checked(by))


class UnguardedDomain(Rule):
    code, name = "SO204", "unguarded-domain"
    widens = True
    what = """log(0) is -inf, the derivative of sqrt at 0 and of acos, asin and acosh at 1 is infinite, as atanh and
    logit are there, and a negative argument is NaN."""
    why = """Probabilities round to 0, differences and variances are exactly 0, cosines exceed 1 by a rounding. The
    chain rule turns the infinite derivative into NaN as soon as it meets a 0."""
    fix = """`safeops.safe_log`, `safe_sqrt`, `safe_rsqrt`, `safe_acos`, `safe_acosh`, `safe_asin`, `safe_pow`: finite
    values, gradient 0 beyond the bound. For log(softmax(x)) and log(sigmoid(x)): `F.log_softmax(x)` and
    `F.logsigmoid(x)`; for log(1 - sigmoid(x)) and log(1 - exp(x)): `F.logsigmoid(-x)` and `safeops.log1mexp(x)`."""
    rewrites = """`torch.log(x)`, `x.log()` and the like to `safeops.safe_log(x)`: the same value and dtype inside the
    domain. `log(1 - exp(x))` to `safeops.log1mexp(x)`, `log(1 - p.clamp(max=1 - eps))` to `safeops.safe_log(1 - p,
    eps=eps)`; other logarithms of `1 - p` are left alone: what half rounds to 0 has a finite one in fp32"""
    ops = OPS

    def operation(self, op, walk):
        if not walk.training or not leaves_domain(op, walk) or walk.reported("SO206", op.node):
            return
        use, text = self._instead(op, walk)
        plain = not op.inplace and not op.kwargs and isinstance(op.node, (cst.Call, cst.BinaryOperation))
        inner = walk.op(argument(op))
        less = inner is not None and inner.name in ("sub", "neg")  # log(1 - p), log1p(-p)
        bounded = [op.input] if op.name in ANGLES else [inner.input, *inner.args] if less else []
        clamped = any(f(n, walk) is False for n in bounded for f in (_below_one, _above_one))
        guard = "a clamp that is 1 in half" if clamped else "nothing"
        message = f"{guard} keeps the argument of {op.name} inside its domain; use {use}"
        fix = [(op.node, text)] if text and plain else None
        walk.report(self, op.node, message, fix, likely=_meets_edge(argument(op), op, walk))

    def _instead(self, op, walk):
        """Returns (what to use, the text of a rewrite or None)."""
        made = walk.op(argument(op))
        if op.name.startswith("log") and made is not None:
            if made.name in ("softmax", "sigmoid"):
                scale = "" if op.name == "log" else f", over math.log({op.name.removeprefix('log')})"
                return f"F.log{'_' * (made.name == 'softmax')}{made.name}{scale}", None
            p = _complement(op, made)
            if p is not None and walk.value(p).tensor:
                return self._of_complement(op, p, walk)
        if name := SAFE.get(op.name):
            rest = "".join(f", {walk.argument(n)}" for n in op.args)
            complete = len(op.args) == (op.name == "pow")
            return f"safeops.{name}", f"safeops.{name}({walk.argument(op.input)}{rest})" if complete else None
        return ELSE.get(op.name, ".float() and then a clamp that keeps it below 1"), None

    def _of_complement(self, op, p, walk):
        """Returns what `_instead` does, for log(1 - p). If half has rounded p to 1, log(1 - p) should still be finite,
        and a floor does not give its value."""
        made, inline = walk.op(p), walk.op(p) is not None and walk.op(p).node is p
        clamp = made is not None and _upper(p, walk) is not None
        source = walk.op(made.input) if clamp else made
        if source is not None and source.name == "exp":
            plain = source is made and inline
            return "safeops.log1mexp of what went into exp", f"safeops.log1mexp({walk.argument(source.input)})" * plain
        if source is not None and source.name in ("sigmoid", "softmax"):
            return {
                "sigmoid": "F.logsigmoid(-x)",
                "softmax": "safeops.log1mexp(F.log_softmax(x, dim, dtype=torch.float64))",
            }[source.name], None
        if clamp:
            bound, alone = _upper(p, walk), len(made.args) + len(made.kwargs) == 1
            one = isinstance(bound, cst.BinaryOperation) and isinstance(bound.operator, cst.Subtract)
            eps = walk.text(bound.right) if one and number(bound.left) == 1 else f"1 - {walk.text(bound)}"
            if op.name == "log1p":  # log1p(-p) keeps the digits of a small p, which 1 - p would lose
                return "p.float() before the clamp", None
            x = walk.text(made.input) if made.origin == "method" else f"({walk.argument(made.input)})"
            text = f"safeops.safe_log(1 - {x}, eps={eps})" if alone and inline else None
            return f"safeops.safe_log(1 - p, eps={eps})", text
        text = f"safeops.safe_log({walk.argument(op.input)})" if op.name == "log" and made is None else None
        return "safeops.safe_log of 1 - p.float()", text


def _complement(op, made):
    """Returns p if an operation is log(1 - p) or log1p(-p), else None. made: the Op of its operand."""
    if op.name == "log1p":
        return made.input if made.name == "neg" else None
    return made.args[0] if made.name == "sub" and number(made.input) == 1 and len(made.args) == 1 else None


def _upper(node, walk):
    """Returns the upper bound of a clamp; None if the expression is no clamp or has no upper bound."""
    op = walk.op(node)
    return op.arg(op.name == "clamp", "max") if op is not None and op.name in ("clamp", "clamp_max") else None


def _above_one(node, walk):
    """True if a clamp keeps the value above 1; False if its bound is not above 1, or rounds to 1 in fp16; None if no
    bound is known."""
    op = walk.op(node)
    value = walk.number(op.arg(0, "min")) if op is not None and op.name in ("clamp", "clamp_min") else None
    return None if value is None else value > (1 if walk.value(node).wide else 1 + 2 * HALF_STEP)


def _below_one(node, walk):
    """True if a clamp keeps the value below 1; False if its bound is not below 1, or rounds to 1 in fp16; None if no
    bound is known."""
    bound = _upper(node, walk)
    if bound is not None and "finfo" in walk.text(bound):
        return True  # the bound depends on the dtype, such as 1 - torch.finfo(x.dtype).eps
    value = walk.number(bound)
    return None if value is None else value < (1 if walk.value(node).wide else 1 - HALF_STEP)


RULES = (UnguardedDomain,)

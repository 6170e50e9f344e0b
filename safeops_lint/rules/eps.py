"""SO206: an eps that is 0 in half."""

import re

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.domains import HALF_STEP, PROBABILITY, sources, without_graph
from safeops_lint.rules.squares import in_half, through, wide
from safeops_lint.syntax import number
from safeops_lint.tables import HALVED, RAISED, SHAPING

HALF_TINY = 6e-8  # above fp16's smallest number, 2^-24 = 5.96e-8; numbers up to 2^-25 round to 0
STEEP = 1 / 65504  # for a smaller x, 1 / x, which is also the slope of log(x), is inf in fp16
STEEP_OPS = {"log", "log2", "log10", "sqrt", "rsqrt", "pow", "reciprocal", "div", "addcdiv"}
GUARDS = ("add", "sub", "clamp", "clamp_min", "maximum", "max", "where", "masked_fill", "full_like", "pow")
GUARDS += ("normalize", "cosine_similarity")
COUNT = ", where a count beyond 65504 is inf; use safeops.masked_mean"

DATA = re.compile(r"(^|[._])(targets?|labels?|anchors?|gt|y?_?true|truth|boxes)(_|$|\d)")  # data, which are fp32


def tiny(node, walk):
    """Returns the number that an expression has as its value, if it is too small for fp16; else None."""
    value = walk.number(node)
    return value if isinstance(value, (int, float)) and 0 < abs(value) < HALF_TINY else None


def guards(node, walk, depth=0):
    """Yield the Ops that may guard an expression: for `(p + eps) / (q + eps)`, both sums."""
    op = through(node, walk)
    if op is None or depth > 3:
        return
    if op.name not in ("div", "mul", "neg"):
        yield op
        return
    for operand in (op.input, *op.args):
        yield from guards(operand, walk, depth + 1)


def _small(op, walk):
    """True if the code shows that the guarded value may be small and in half: it is a probability by its name, a
    difference, a product. (Only the caller knows the values of other arguments. Sums, norms and powers are fp32 under
    autocast.)"""
    for node in (n for n in (op.input, *op.args) if walk.value(n).tensor):
        if _raised(node, walk):
            return False
        names = sources(node, walk)
        if names and all(DATA.search(name) for name in names):
            continue
        made = through(node, walk, SHAPING | {"abs", "neg", "sqrt", "mean"})
        named = bool(names) and all(PROBABILITY.search(name) for name in names)
        if named if made is None else made.name not in ("matmul", "mm", "bmm", "einsum"):
            return True
    return False


def _raised(node, walk, depth=0):
    """True if autocast computes the value in fp32 (`x**2`, a sum), and this file casts nothing to half. The value is
    then half only if another file casts the whole model to half."""
    op = walk.op(node)
    if op is None or depth > 12 or op.name in HALVED or walk.casts_to_half:
        return False
    return op.name in RAISED or any(_raised(n, walk, depth + 1) for n in (op.input, *op.args))


def _counts(op, walk):
    """True if the operands of a guard contain the sum of a mask in the dtype of another tensor: in half, the sum is inf
    beyond 65504, and for an empty mask only the eps is left, which is 0."""
    made = [walk.op(n) for n in (op.input, *op.args)]
    return any(m is not None and m.name == "sum" and in_half(m.input, walk) for m in made)


class TinyEps(Rule):
    code, name = "SO206", "eps-below-half"
    widens = True
    what = "An eps below 6e-8 is 0 in fp16, and vanishes beside 1 in bf16: the guard is not there when it is needed."
    why = """The smallest number of fp16 is 5.96e-8. `p + 1e-8` is p, `clamp(min=1e-8)` clamps at 0. Half holds 1e-6,
    but not one over it: the slope of `log(p + 1e-6)` at 0, and 1 over it, are inf."""
    fix = """`safeops.safe_log(p, eps=1e-8)`, `safeops.safe_div(a, b, eps=1e-8, fill_value=None)`: there eps is a floor
    that is resolved in fp32. Or `.float()` first."""
    rewrites = """`log(p.clamp(min=eps))` to `safeops.safe_log(p, eps=eps)`. An eps that is added is left alone: a floor
    is another number where p is near it"""
    ops = (*GUARDS, *sorted(STEEP_OPS - {"pow"}))

    def operation(self, op, walk):
        forward = walk.scope.is_module and walk.scope.name == "forward"
        if wide(op, walk) or not (walk.computing or forward):
            return
        if op.name in STEEP_OPS:
            self._meets(op, walk)
        if op.name in ("log", "sqrt", "div", "reciprocal"):
            if not self._steep(op, walk):
                self._outer(op, walk)
        elif op.name in GUARDS:
            self._guard(op, walk)

    def _guard(self, op, walk):
        """Report an eps that keeps a value away from 0. The report is not likely, until `_meets` finds the operation
        that needs the eps."""
        if op.name in ("where", "masked_fill"):  # b = torch.where(b == 0, 1e-8, b)
            literal = next((n for n in (*op.args, *op.kwargs.values()) if tiny(n, walk)), None)
        else:
            literal = op.arg(0, "min", "other", "fill_value", "eps")
        tensors = op.name == "pow" and op.origin == "torch"
        tensors = tensors or any(walk.value(n).tensor for n in (op.input, *op.args))
        rounded = op.input if op.name == "pow" else literal if op.name in ("add", "sub") else None
        value = walk.number(rounded)
        if tensors and isinstance(value, (int, float)) and 0 < abs(value - 1) < HALF_STEP:  # 1 + 1e-7
            walk.report(self, op.node, f"{walk.text(rounded)} is 1 in fp16; use .float() first")
            return
        eps = tiny(literal, walk) if literal is not None else None
        eps = tiny(op.input, walk) if eps is None and op.name == "add" else eps
        if eps is None or not tensors:
            return
        if any(walk.value(n).integer for n in (op.input, *op.args)):  # integer tensor + number is fp32
            return
        message = f"{eps:g} is 0 in fp16; use a safeops function with eps=, which is resolved in fp32"
        walk.report(self, op.node, message, likely=False)

    def _meets(self, op, walk):
        """Make the report on a guard likely if `op` needs the guard: a division by it, or its logarithm, root or
        power."""
        whole = op.name == "pow" and (walk.number(op.arg(0, "exponent")) or 0.5) % 1 == 0
        divides = op.name in ("div", "addcdiv")
        for guard in () if whole else guards(op.args[-1] if divides and op.args else op.input, walk):
            report = walk.reports.get((self.code, id(guard.node)))
            plain = not any(_raised(n, walk) for n in (guard.input, *guard.args) if walk.value(n).tensor)
            counts = divides and _counts(guard, walk)
            if report is not None and (counts or (plain if divides else _small(guard, walk))):
                message = report.message.partition(";")[0] + COUNT if counts else report.message
                walk.report(self, guard.node, message, report.fix)

    def _steep(self, op, walk):
        """Report log(p + 1e-6) and 1 / (p + 1e-6): half holds the eps, but in fp16 the slope or the quotient is inf.
        Returns True if it reports."""
        inner = op.args[0] if op.name == "div" and op.args else op.input
        guard = walk.op(inner)
        clamps = ("clamp", "clamp_min") if op.name in ("div", "reciprocal") else ()
        if guard is None or guard.name not in ("add", *clamps) or op.name == "sqrt" or not walk.training:
            return False
        known = [walk.number(n) for n in (guard.arg(0, "min", "other"), guard.input)]
        eps = next((n for n in known if n is not None and HALF_TINY <= n < STEEP), None)
        added = walk.value(guard.input)
        if eps is None or added.mask or added.integer or walk.value(inner).wide:
            return False
        if op.name == "log" and without_graph(guard.input, walk):
            return False
        what = "the slope of log there is inf in fp16" if op.name == "log" else "one over it is inf in fp16"
        use = "safe_log with eps=" if op.name == "log" else "safe_div with eps= and fill_value=None"
        likely = _small(guard, walk) and (op.name != "div" or walk.number(op.input) is not None)
        walk.report(self, op.node, f"{eps:g} is too small: {what}; use safeops.{use}, or .float() first", likely=likely)
        return True

    def _outer(self, op, walk):
        """For log(p.clamp(min=eps)) or a / (b + eps), move the report on the guard to the whole expression. A clamp in
        a log is rewritten, since safe_log's floor is the same. An added eps is not: it also changes larger values."""
        inner = (op.args[0] if op.args else None) if op.name == "div" else op.input
        guard, report = walk.op(inner), walk.reports.get((self.code, id(inner)))
        if report is None or guard is None or guard.node is not inner or op.inplace or op.kwargs:
            return
        if isinstance(op.node, cst.AugAssign) or guard.name not in ("add", "clamp", "clamp_min") or len(guard.args) > 1:
            return
        eps = guard.arg(0, "min", "other")
        if number(eps) is None and not isinstance(eps, cst.Name) or not walk.value(guard.input).tensor:
            return
        if set(guard.kwargs) - {"min"}:
            return
        name = f"safeops.safe_{op.name}"
        use = f"{name} with eps=" + " and fill_value=None" * (op.name in ("div", "reciprocal"))
        message = f"{walk.text(eps)} is 0 in fp16"
        message += COUNT if op.name == "div" and _counts(guard, walk) else f"; use {use}, which is resolved in fp32"
        floor = guard.name != "add" and op.name == "log"
        fix = [(op.node, f"{name}({walk.argument(guard.input)}, eps={walk.text(eps)})")] if floor else None
        walk.report(self, op.node, message, fix, covers=[(self.code, inner)], likely=report.likely)


RULES = (TinyEps,)

"""SO206: an eps that half does not hold."""

import re

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.rules.domains import exponent, without_graph
from safeops.lint.rules.guards import HALF_TINY, beside_one, guards, matters, needless, small, tiny
from safeops.lint.rules.squares import normalized, through, wide
from safeops.lint.syntax import number
from safeops.lint.tables import SHAPING
from safeops.lint.uses import COMPARED, no_gradient

COMPLEX = re.compile(r"(^|_)(re|im|real|imag)$")  # parts of complex numbers, which are hardly ever half
SPREAD = re.compile(r"std|sigma|scale", re.IGNORECASE)  # what divides; other exponentials may be 0
STEEP_OPS = {"log", "log2", "log10", "sqrt", "rsqrt", "pow", "reciprocal", "div"}
LOG_TINY = -17.4  # exp of less is 0 in fp16
STEEP = 1 / 65504  # the slope of log at a smaller number, and one over it, are inf in fp16
DEFAULT_EPS = {"normalize": 1e-12, "cosine_similarity": 1e-8, "cosine_embedding_loss": 1e-12, "poisson_nll_loss": 1e-8}


def _single(value, walk):
    """Whether what was made here is fp32: `torch.rand(n)`, not `rand_like(x)`."""
    op = value.op
    while op is not None and walk.op(op.input) is not None:
        op = walk.op(op.input)
    return op is None or not (op.name.endswith("_like") or op.name.startswith("new_") or "dtype" in op.kwargs)


class TinyEps(Rule):
    code, name = "SO206", "eps-below-half"
    widens = True
    what = "An eps below 6e-8 is 0 in fp16, and vanishes beside 1 in bf16: the guard is not there when it is needed."
    why = """
    The smallest number of fp16 is 5.96e-8. `p + 1e-8` is p, `clamp(min=1e-8)` clamps at 0. Half holds 1e-6, but not
    one over it: the slope of `log(p + 1e-6)` at 0, and 1 over it, are inf. What divides, or goes into a root or a
    logarithm, is looked at in losses and modules, elsewhere where the rule is asked for; so is
    `exp(log_std.clamp(-20, 2))`, which is 0.
    """
    fix = """
    `safeops.safe_log(p, eps=1e-8)`, `safeops.safe_div(a, b, eps=1e-8)`: there eps is a floor that is resolved in
    fp32. Or `.float()` first.
    """
    outcome = "the loss is inf in fp16"
    rewrites = """
    `log(p + eps)`, `log(p.clamp(min=eps))`, `sqrt(p + eps)` and `a / (b + eps)` to `safe_log`, `safe_sqrt` and
    `safe_div` with `eps=`: equal to rounding where p and b are far above eps. `(a + eps) / (b + eps)`, a smoothed
    ratio, gets `fill_value=1`: where both are 0 it stays 1. `a / (a.norm(...) + eps)` becomes `normalize`
    """
    bad = """
    def entropy_loss(p):
        return -torch.log(p + 1e-8).mean()
    """
    good = """
    def entropy_loss(p):
        return -safeops.safe_log(p, eps=1e-8).mean()
    """
    ops = ("add", "sub", "clamp", "clamp_min", "maximum", "max", "log", "sqrt", "div", "normalize", "cosine_similarity")
    ops += ("rsqrt", "log2", "log10", "addcdiv", "exp", "mul")
    ops += ("where", "full_like", "masked_fill", "pow", "reciprocal", "cosine_embedding_loss", "poisson_nll_loss")

    def operation(self, op, walk):
        if wide(op, walk):
            return
        if op.name in ("exp", "mul"):
            (self._below if op.name == "exp" else self._entropy)(op, walk)
            return
        forward = walk.scope.is_module and walk.scope.name == "forward"
        in_loss = walk.computing or forward
        if not in_loss:
            self._anywhere(op, walk)
        if in_loss and op.name in STEEP_OPS:
            self._meets(op, walk)
        if not in_loss or op.name in ("rsqrt", "log2", "log10", "addcdiv"):  # their guard was seen
            return
        if op.name in ("log", "sqrt", "div", "reciprocal"):
            if not self._steep(op, walk):
                self._outer(op, walk)
            return
        if op.name in DEFAULT_EPS and (walk.training or forward):
            if op.name == "poisson_nll_loss" and "False" not in walk.text(op.arg(1, "log_input") or op.node.func):
                return
            literal = op.kwargs.get("eps") if op.name.endswith("_loss") else op.arg(2, "eps")
            if literal is None and op.origin != "method":
                self._default(op, walk)
        elif op.name in ("where", "masked_fill"):  # b = torch.where(b == 0, 1e-8, b)
            literal = next((n for n in (*op.args, *op.kwargs.values()) if tiny(n, walk)), None)
        else:
            literal = op.arg(0, "min", "other", "fill_value")
        rounded = op.input if op.name == "pow" else literal if op.name in ("add", "sub") else None
        if rounded is not None and beside_one(rounded, walk) and self._of_tensors(op, walk):
            walk.report(self, op.node, f"{walk.text(rounded)} is 1 in fp16; use .float() first")
            return
        eps = tiny(literal, walk) if literal is not None else None
        if eps is None and op.name == "add":
            eps = tiny(op.input, walk)
        tolerance = op.name in ("add", "sub") and eps is not None and no_gradient(walk.body, op.node, COMPARED)
        if eps is not None and self._of_tensors(op, walk) and not (tolerance or needless(op, walk)):
            message = f"{eps:g} is 0 in fp16; use a safeops function with eps=, which is resolved in fp32"
            own = op.name in DEFAULT_EPS and walk.casts_to_half
            walk.report(self, op.node, message, likely=own)  # see _meets for the others

    def _meets(self, op, walk):
        """What was guarded is likely to need it where its logarithm, root, power or reciprocal is taken."""
        whole = op.name == "pow" and (exponent(op.arg(0, "exponent"), walk) or 0.5) % 1 == 0
        for guard in () if whole else guards(op.args[0] if op.name == "div" and op.args else op.input, walk):
            report = walk.reports.get((self.code, id(guard.node)))
            if report is not None and matters(op, guard, walk):
                walk.report(self, guard.node, report.message, report.fix)

    def _anywhere(self, op, walk):
        """What divides, or goes into a root or a logarithm, needs its guard whatever the code is about."""
        if op.name not in STEEP_OPS - {"pow"} | {"addcdiv"} or walk.imports.measures:
            return
        guarded = op.args[-1] if op.name in ("div", "addcdiv") and op.args else op.input
        guard = through(guarded, walk, SHAPING | {"sqrt"})
        if guard is None or guard.name not in ("add", "clamp", "clamp_min", "maximum", "max"):
            return
        sides = [n for n in (guard.input, guard.arg(0, "min", "other")) if n is not None]
        eps = next((e for n in sides if (e := tiny(n, walk)) is not None), None)
        of = [walk.value(n) for n in sides if walk.value(n).tensor]
        exact = any(v.integer or v.host or v.mask == "bool" or v.constant and _single(v, walk) for v in of)
        exact = exact or any(COMPLEX.search(name) for name in walk.names_in(guard.node))
        if eps is not None and of and not (exact or needless(guard, walk) or walk.value(guard.node).wide):
            message = f"{eps:g} is 0 in fp16, and guards nothing there; .float() first"
            module = walk.scope.is_module and not walk.scope.no_grad  # a function may well be given fp32
            walk.report(self, guard.node, message, likely=module and matters(op, guard, walk))

    def _below(self, op, walk):
        """`exp(log_std.clamp(-20, 2))`"""
        clamp = through(op.input, walk)
        floor = walk.number(clamp.arg(0, "min")) if clamp is not None and clamp.name in ("clamp", "clamp_min") else None
        spread = any(SPREAD.search(name) for n in (op.input, clamp and clamp.input) if n for name in walk.names_in(n))
        if floor is not None and spread and LOG_TINY * 4 < floor < LOG_TINY:
            walk.report(
                self, op.node, f"exp({floor:g}) is 0 in fp16: a deviation of nothing; clamp at -10, or .float()"
            )

    def _steep(self, op, walk):
        """log(p + 1e-6), 1 / (p + 1e-6): half holds the eps, but neither the slope nor the quotient."""
        inner = op.args[0] if op.name == "div" and op.args else op.input
        guard = walk.op(inner)
        clamps = ("clamp", "clamp_min") if op.name in ("div", "reciprocal") else ()
        if guard is None or guard.name not in ("add", *clamps) or op.name == "sqrt" or not walk.training:
            return False
        known = [walk.number(n) for n in (guard.arg(0, "min", "other"), guard.input)]
        eps = next((n for n in known if n is not None and HALF_TINY <= n < STEEP), None)
        added = walk.value(guard.input)
        if eps is None or added.mask or added.integer or walk.value(inner).wide or needless(guard, walk):
            return False
        if op.name == "log" and without_graph(guard.input, walk):
            return False
        what = "the slope of log there is inf in fp16" if op.name == "log" else "one over it is inf in fp16"
        use = "safe_log" if op.name == "log" else "safe_div"
        message = f"{eps:g} is too small: {what}; use safeops.{use} with eps=, or .float() first"
        large = op.name == "div" and walk.number(op.input) is None  # of v / (|v| + eps) nothing is large
        likely = small(guard, walk) and not large
        walk.report(self, op.node, message, likely=likely)
        return True

    def _entropy(self, op, walk):
        """p * log(p + 1e-6), whose slope there is log(1e-6): nothing is divided by the eps alone."""
        sides = (op.input, *op.args)
        for side, factor in zip(sides, sides[::-1]):
            log = walk.op(side)
            guard = walk.op(log.input) if log is not None and log.name == "log" else None
            own = guard is not None and walk.text(guard.input) == walk.text(factor).lstrip("-")
            if own and tiny(guard.arg(0, "other"), walk) is None:
                walk.reports.pop((self.code, id(log.node)), None)

    def _of_tensors(self, op, walk):
        return op.name == "pow" and op.origin == "torch" or any(walk.value(n).tensor for n in (op.input, *op.args))

    def _default(self, op, walk):
        """F.normalize(x) and F.cosine_similarity(x, y), whose own eps half does not hold; autocast computes both in
        fp32."""
        made = walk.value(op.input).node
        weights = isinstance(made, cst.Call) and walk.imports.resolve(made.func) == "torch.nn.Parameter"
        if weights or walk.value(op.input).constant:  # no row of random numbers is 0
            return
        fix = None
        if op.name == "normalize" and len(op.args) < 2 and set(op.kwargs) <= {"dim", "p"}:
            order, dim = op.arg(0, "p"), op.kwargs.get("dim")
            if (order is None or number(order) == 2) and walk.value(op.input).tensor:
                by = "1" if dim is None else walk.text(dim)
                fix = [(op.node, f"safeops.normalize({walk.argument(op.input)}, dim={by})")]
        eps = DEFAULT_EPS[op.name]
        zero = "log of 0 -inf" if op.name == "poisson_nll_loss" else "a zero vector NaN"
        message = f"the default eps, {eps:g}, is 0 in fp16, and {zero}; use safeops.{op.name}"
        walk.report(self, op.node, message, fix, likely=walk.casts_to_half)

    def _outer(self, op, walk):
        """log(p + eps), sqrt(p + eps), a / (b + eps): what was found inside can be rewritten here."""
        inner = (op.args[0] if op.args else None) if op.name == "div" else op.input
        if (
            inner is None
            or not walk.reported("SO206", inner)
            or op.inplace
            or op.kwargs
            or isinstance(op.node, cst.AugAssign)
        ):
            return
        guard = walk.op(inner)
        if (
            guard is None
            or guard.node is not inner
            or guard.name not in ("add", "clamp", "clamp_min")
            or len(guard.args) > 1
        ):
            return
        eps = guard.arg(0, "min", "other")
        if number(eps) is None and not isinstance(eps, cst.Name) or not walk.value(guard.input).tensor:
            return
        if set(guard.kwargs) - {"min"} or (guard.name == "add" and guard.kwargs):
            return
        x, covers = walk.argument(guard.input), [("SO206", inner)]
        if op.name != "div":
            text = f"safeops.safe_{op.name}({x}, eps={walk.text(eps)})"
        elif number(op.input) == 1:
            text = f"safeops.safe_reciprocal({x}, eps={walk.text(eps)})"
        elif not walk.value(op.input).tensor or len(op.args) != 1:
            return
        elif (dim := normalized(op.input, guard.input, walk)) is not None:
            text = f"safeops.normalize({walk.argument(op.input)}, dim={dim}, eps={walk.text(eps)})"
        else:
            text = self._quotient(op.input, x, eps, walk)
            covers += [("SO206", op.input)]
        if text is not None:
            name = text[: text.index("(")]
            message = f"{walk.text(eps)} is 0 in fp16; use {name} with eps=, which is resolved in fp32"
            likely = walk.reports[self.code, id(inner)].likely
            walk.report(self, op.node, message, [(op.node, text)], covers=covers, likely=likely)

    def _quotient(self, numerator, x, eps, walk):
        """a / (x + eps). In (a + e) / (x + eps) what comes out where a and x are 0 is meant: e / eps."""
        added = walk.op(numerator)
        if added is None or added.name != "add" or len(added.args) != 1 or tiny(added.args[0], walk) is None:
            if added is not None and added.name == "add" and tiny(added.input, walk) is not None:
                return None
            return f"safeops.safe_div({walk.argument(numerator)}, {x}, eps={walk.text(eps)})"
        if added.node is not numerator or added.kwargs or walk.text(added.args[0]) != walk.text(eps):
            return None
        return f"safeops.safe_div({walk.argument(added.input)}, {x}, eps={walk.text(eps)}, fill_value=1)"


RULES = (TinyEps,)

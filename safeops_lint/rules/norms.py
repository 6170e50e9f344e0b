"""SO205: a norm written as the root of a sum of squares."""

from safeops_lint.rule import Rule
from safeops_lint.rules.domains import without_graph
from safeops_lint.rules.squares import dims, squared
from safeops_lint.syntax import number


def _error(node, walk):
    """True for a difference of two tensors; not for `x - x.mean()`, which is 0 where x is constant."""
    op = walk.op(node)
    return op is not None and op.name == "sub" and not walk.names_in(op.input) & walk.names_in(op.args[0])


class SpelledNorm(Rule):
    code, name = "SO205", "sqrt-of-square-sum"
    widens = True
    what = """`sqrt(sum(x**2))` is the norm with the gradient 0 / 0 = NaN at the zero vector, and with squares that
    overflow in half."""
    why = """The derivative of sqrt at 0 is infinite, that of the square 0: their product is NaN. `x.norm()` has
    gradient 0 there."""
    fix = "`safeops.safe_norm(x, dim=...)`: gradient 0 at a zero vector, and no square that overflows."
    rewrites = "to `safeops.safe_norm(x, dim=..., keepdim=...)`: fp32 for half input"
    ops = ("sqrt", "pow")

    def operation(self, op, walk):
        if walk.scope.no_grad or op.name == "pow" and number(op.arg(0, "exponent")) != 0.5:
            return
        if not (walk.training or walk.scope.is_module and walk.scope.name == "forward"):
            return
        total = walk.op(op.input)
        if total is None or total.name != "sum" or total.inplace or walk.value(op.input).constant:
            return
        base = squared(total.input, walk)
        if base is None or walk.checked(op.input):
            return
        if without_graph(base, walk):
            return
        fix = None
        square = walk.op(total.input)
        if total.node is op.input and square.node is total.input and not op.inplace:
            rest = dims(total, walk)
            fix = rest and [(op.node, f"safeops.safe_norm({walk.argument(base)}{rest[0]})")]
        covers = [("SO201", total.node), ("SO204", op.node)]
        message = "the gradient of this norm is NaN at a zero vector; use safeops.safe_norm"
        met = not (total.args or total.kwargs) and _error(base, walk)  # the error of a whole batch is hardly ever 0
        walk.report(self, op.node, message, fix, covers=covers, likely=not met)


RULES = (SpelledNorm,)

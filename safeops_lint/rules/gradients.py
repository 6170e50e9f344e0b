"""SO208: where() applied after an unsafe operation, whose gradient is then NaN."""

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.domains import unsafe, without_graph
from safeops_lint.syntax import number


class WhereAfter(Rule):
    code, name = "SO208", "where-after-unsafe"
    widens = True
    what = """`torch.where(ok, unsafe(x), 0)` selects after the fact: the value is right, the gradient NaN wherever
    `unsafe` has none."""
    why = """where hands the branch it drops a gradient of 0, and 0 times the infinite derivative is NaN. `masked_fill`
    does the same."""
    fix = """`safeops.safe_div`, `safe_log`, ..., or `safeops.apply_where(ok, (x,), unsafe, fill_value=0)`, which never
    shows `unsafe` what is dropped."""
    rewrites = "`torch.where(b != 0, a / b, 0)` to `safeops.safe_div(a, b)`"
    ops = ("where", "masked_fill")

    def operation(self, op, walk):
        if walk.scope.no_grad or op.inplace or walk.scope.metric or not walk.training or len(op.args) != 2:
            return
        if op.name == "where" and op.origin != "method":
            condition, branches = op.input, op.args
        else:  # x.where(ok, 0), x.masked_fill(bad, 0)
            condition, branches = op.args[0], [op.input]
        for branch in branches:
            result = self._unsafe(branch, condition, walk)
            if result is None:
                continue
            if without_graph(branch, walk):  # the value is right, and there is no gradient
                walk.reports.pop(("SO202", id(result.node)), None)
                continue
            covers = [(code, result.node) for code in ("SO202", "SO204")]
            message = f"{op.name}() after {result.name} keeps its NaN gradient; use safeops.apply_where or a safe_* op"
            walk.report(self, op.node, message, self._fix(op, branch, result, walk), covers=covers)
            return

    def _unsafe(self, branch, condition, walk):
        """Returns the unsafe Op that made a branch, if the condition depends on a name in its operand; else None."""
        op = walk.op(branch)
        if op is None or op.inplace or walk.value(branch).constant:
            return None
        by = op.args[0] if op.name == "div" and op.args else op.input
        made = walk.value(condition).node
        asked = walk.names_in(condition) | walk.names_in(made)  # `ok`, and `den` from `ok = den != 0`
        return op if walk.names_in(by) & asked - set(walk.imports.names) and unsafe(op, walk) else None

    def _fix(self, op, branch, quotient, walk):
        test, compared = op.input, getattr(op.input, "comparisons", ())
        if op.name != "where" or op.origin == "method" or op.kwargs or quotient.kwargs or len(compared) != 1:
            return None
        if quotient.name != "div" or quotient.node is not branch or branch is not op.args[0] or number(op.args[1]) != 0:
            return None
        if not isinstance(compared[0].operator, cst.NotEqual) or number(compared[0].comparator) != 0:
            return None
        a, b = quotient.input, quotient.args[0]
        if walk.text(test.left) != walk.text(b) or not walk.value(a).tensor:
            return None
        return [(op.node, f"safeops.safe_div({walk.argument(a)}, {walk.argument(b)})")]


RULES = (WhereAfter,)

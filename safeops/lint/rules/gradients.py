"""SO2xx, what only backward shows: where() after the fact, and in-place writes on what was saved."""

import re

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.rules.domains import leaves_domain, without_graph
from safeops.lint.syntax import number
from safeops.lint.tables import SAVES_RESULT
from safeops.lint.uses import no_gradient


def _complement_of_exp(op, walk):
    """A branch of `where(x < t, log1p(-exp(x)), log(-expm1(x)))`, the accurate log(1 - exp(x)): NaN at x = 0 alone."""
    inner = walk.op(op.input) if op.name in ("log", "log1p") else None
    exp = walk.op(inner.input) if inner is not None and inner.name == "neg" else None
    return exp is not None and exp.name in ("exp", "expm1")


class WhereAfter(Rule):
    code, name = "SO208", "where-after-unsafe"
    what = """
    `torch.where(ok, unsafe(x), 0)` selects after the fact: the value is right, the gradient NaN wherever `unsafe`
    has none.
    """
    why = """
    where hands the branch it drops a gradient of 0, and 0 times the infinite derivative is NaN. `masked_fill` and
    `nan_to_num` do the same.
    """
    fix = """
    `safeops.safe_div`, `safe_log`, ..., or `safeops.apply_where(ok, (x,), unsafe, fill_value=0)`, which never shows
    `unsafe` what is dropped.
    """
    outcome = "the loss is finite and its gradient NaN"
    rewrites = "`torch.where(b != 0, a / b, 0)` to `safeops.safe_div(a, b)`"
    bad = """
    def ratio_loss(a, b):
        return torch.where(b != 0, a / b, 0).mean()
    """
    good = """
    def ratio_loss(a, b):
        return safeops.safe_div(a, b).mean()
    """
    ops = ("where", "masked_fill", "nan_to_num")

    def operation(self, op, walk):
        if walk.scope.no_grad or op.inplace:
            return
        if op.name == "where" and op.origin != "method":
            condition, branches = op.input, op.args
        else:  # x.where(ok, 0), x.masked_fill(bad, 0), x.nan_to_num()
            condition, branches = op.args[0] if op.args else None, [op.input]
        if len(branches) == 0 or op.name != "nan_to_num" and len(op.args) != 2:
            return
        if not (walk.computing or walk.scope.is_module and walk.scope.name == "forward"):
            return
        for branch in branches:
            unsafe = self._unsafe(branch, condition if op.name != "nan_to_num" else None, walk)
            if unsafe is None:
                continue
            no_graph = walk.scope.metric or without_graph(branch, walk)
            if no_graph or no_gradient(walk.body, op.node):  # the value is right, and there is no gradient
                for code in ("SO202", "SO203") if no_graph or no_gradient(walk.body, unsafe.node) else ():
                    walk.reports.pop((code, id(unsafe.node)), None)
                continue
            fix = self._fix(op, branch, unsafe, walk)
            covers = [(code, unsafe.node) for code in ("SO202", "SO203", "SO204")]
            message = (
                f"{op.name}() after {unsafe.name} keeps its NaN gradient; use safeops.apply_where or a safe_* function"
            )
            walk.report(self, op.node, message, fix, covers=covers, likely=not _complement_of_exp(unsafe, walk))
            return

    def _unsafe(self, branch, condition, walk):
        op = walk.op(branch)
        if op is None or op.inplace or walk.value(branch).constant:
            return None
        if op.name in ("div", "reciprocal"):
            by = (op.args or [None])[0] if op.name == "div" else op.input
            value = walk.value(by) if by is not None else None
            # only where the condition is about the divisor
            if value is None or not value.tensor or value.positive or value.constant:
                return None
            asked = self._asked(condition, walk)
            return op if asked is None or walk.names_in(by) & asked - set(walk.imports.names) else None
        return op if leaves_domain(op, walk) else None

    def _asked(self, condition, walk):
        """The names in a condition, also in that of `ok = den != 0`; None where there is no condition."""
        if condition is None:
            return None
        made = walk.value(condition).node
        return walk.names_in(condition) | (walk.names_in(made) if made is not None else set())

    def _fix(self, op, branch, unsafe, walk):
        test = op.input
        if op.name != "where" or op.origin == "method":
            return None
        if unsafe.name != "div" or unsafe.node is not branch or branch is not op.args[0] or number(op.args[1]) != 0:
            return None
        if not isinstance(test, cst.Comparison) or len(test.comparisons) != 1 or op.kwargs or unsafe.kwargs:
            return None
        comparison = test.comparisons[0]
        if not isinstance(comparison.operator, cst.NotEqual) or number(comparison.comparator) != 0:
            return None
        a, b = unsafe.input, unsafe.args[0]
        if walk.text(test.left) != walk.text(b) or not walk.value(a).tensor:
            return None
        return [(op.node, f"safeops.safe_div({walk.argument(a)}, {walk.argument(b)})")]


PLAIN = {"clamp", "clamp_min", "clamp_max", "relu", "abs", "neg", "sigmoid", "tanh"}  # number arguments, dtype kept


CHANGES = PLAIN | {"mul", "div", "sub", "pow", "masked_fill", "exp", "sqrt", "log"}  # that an argument shows the caller
GIVEN = re.compile(r"target|label|mask|gt$|truth|valid", re.IGNORECASE)  # names of what has no gradient


def _of_numbers(op, walk, depth=0):
    """Whether something that was made of numbers went into it, as into a window of `torch.arange(n)` and a width."""
    operands = [n for n in (op.input, *op.args) if n is not None and walk.value(n).tensor]
    if any(walk.value(n).constant for n in operands):
        return True
    made = [walk.op(n) for n in operands if depth < 5]
    return any(_of_numbers(inner, walk, depth + 1) for inner in made if inner is not None)


class InPlace(Rule):
    code, name = "SO209", "in-place-on-saved"
    what = """
    An in-place operation (`clamp_`, `mul_`, `/=`, ...) on a result that its own operation, or an operand that
    another one, saved for backward: backward raises.
    """
    why = """
    exp, sqrt, sigmoid, tanh, softmax, relu and others compute their gradient from their result; squares, logarithms and
    products from their operands. On an argument of the loss it changes the caller's tensor.
    """
    fix = """
    The same operation without the underscore; for `x.exp().clamp_(min=eps).log()`: `safeops.safe_log(x.exp(),
    eps=eps)`.
    """
    outcome = "backward raises: a variable needed for gradient computation has been modified in place"
    rewrites = """
    `.exp().clamp_(...)` to `.exp().clamp(...)`; `y.clamp_(...)` alone to `y = y.clamp(...)`, y made in the same
    function
    """
    bad = """
    def rate_loss(energy):
        return energy.exp().clamp_(min=1e-6).mean()
    """
    good = """
    def rate_loss(energy):
        return energy.exp().clamp(min=1e-6).mean()
    """
    ops = (*PLAIN, "add", "sub", "mul", "div", "pow", "masked_fill", "zero", "fill", "exp", "sqrt", "log")
    events = ("Expr",)

    def operation(self, op, walk):
        if not op.inplace or walk.scope.no_grad or walk.scope.knows("inplace"):
            return
        made = walk.op(op.input)
        value = walk.value(op.input)
        if not (walk.training or walk.scope.is_module and walk.scope.name == "forward"):
            return
        if value.constant or value.mask == "bool" or value.integer or value.detached:
            return
        name = op.input.value if isinstance(op.input, cst.Name) else None
        how = f"{op.name}_" if isinstance(op.node, cst.Call) else "an augmented assignment"
        if made is None or made.name not in SAVES_RESULT or made.inplace:
            saver = walk.scope.saved.get(name)
            if saver is not None and not GIVEN.search(name):
                message = f"{how} overwrites what {saver} saved for backward; use the form that returns a new tensor"
                walk.report(self, op.node, message, imports=False)
            elif name in walk.scope.parameters and op.name in CHANGES and walk.scope.loss and walk.scope.outermost:
                message = f"{how} changes the caller's tensor; use the form that returns a new one"
                likely = walk.entered and not (op.name.startswith("clamp") and GIVEN.search(name))
                walk.report(self, op.node, message, imports=False, likely=likely)
            return
        if made.node is op.input and no_gradient(walk.body, op.node):  # no name holds what is written over
            return
        fix = None
        numbers = all(number(n) is not None for n in (*op.args, *op.kwargs.values()))
        if isinstance(op.node, cst.Call) and op.origin == "method" and op.name in PLAIN and numbers:
            if made.node is op.input:
                fix = [(op.node.func.attr, op.name)]
            elif isinstance(op.input, cst.Name) and value.owned:
                walk.notes[id(op.node)] = walk.scope.depth.get(op.input.value) == walk.scope.loops
        message = f"{how} overwrites what {made.name} saved for backward; use the form that returns a new tensor"
        walk.report(self, op.node, message, fix, imports=False, likely=not _of_numbers(made, walk))

    def visit(self, event, node, walk):
        """`y.clamp_(min=0)` as a statement."""
        call = node.value
        if walk.notes.get(id(call)) and walk.reported("SO209", call):
            old = walk.reports[self.code, id(call)]
            name = call.func.value.value
            plain = call.with_changes(func=call.func.with_changes(attr=cst.Name(call.func.attr.value[:-1])))
            walk.report(self, call, old.message, [(call, f"{name} = {walk.text(plain)}")], imports=False)


RULES = (WhereAfter, InPlace)

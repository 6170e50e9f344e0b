"""Walks once over a file, in the order in which its code runs. On the way it infers Values and calls the rules."""

import libcst as cst

from safeops_lint.binding import Binding
from safeops_lint.calls import Calls
from safeops_lint.conditions import Conditions
from safeops_lint.context import Context
from safeops_lint.expressions import Expressions
from safeops_lint.reach import Reach
from safeops_lint.scope import Scope, enter_autocast, function_scope
from safeops_lint.survey import survey
from safeops_lint.syntax import OPERATORS, Op, children, dotted
from safeops_lint.tables import words
from safeops_lint.values import NOTHING, of_op

# Operations whose backward needs their operands: changing an operand in place breaks backward.
SAVES_INPUT = words("""pow square log log2 log10 log1p mul div matmul bmm mm abs sin cos cosh sinh atan atan2 acos asin
    norm mse_loss softplus logsigmoid gelu silu lgamma erf cosine_similarity cdist""")


class Walk(Binding, Calls, Conditions, Context, Expressions):
    """The walk over one file. Rules get this object: it has the Values, the current Scope, and `report`."""

    def __init__(self, module, imports, rules, code, possible=False, scripted=frozenset()):
        self.module, self.imports, self.code = module, imports, code
        self.possible, self.scripted = possible, scripted
        self.results = {}  # (class, function) -> its return expression; None if it has several
        self.raising = 0  # > 0 inside a raise statement, or an assert's message
        self._values = {}
        self._by_op, self._by_event = {}, {}
        for rule in rules:
            for name in rule.ops:
                self._by_op.setdefault(name, []).append(rule)
            for event in rule.events:
                self._by_event.setdefault(event, []).append(rule)

    def run(self):
        """Walk over the file; return the Reports."""
        self.clues, self.helpers = survey(self.module, self.imports, Reach(self.module))
        self.scope, self.classes = Scope(), []
        self.reports = {}  # (code, id(node)) -> Report: a later report replaces an earlier one
        own = self.clues[id(self.module)]  # (a script may train outside of any function)
        self.scope.step = own.backward
        self.scope.used = own.tensors | own.arrays
        self._event("module", self.module)
        self._block(self.module.body)
        told = [report for report in self.reports.values() if report.likely or self.possible]
        for report in told:
            if report.fix and report.rule.widens and not all(self.promotion.allows(*edit) for edit in report.fix):
                report.fix = None
        return told

    # ---- statements

    def _block(self, body):
        for statement in body.body if hasattr(body, "body") else body:
            self._statement(statement)

    def _statement(self, node):
        handler = getattr(self, "_" + type(node).__name__, None)
        if handler:
            handler(node)
        elif isinstance(node, (cst.SimpleStatementLine, cst.SimpleStatementSuite, cst.IndentedBlock)):
            self._block(node)
        else:  # Expr, Del, ...: their expressions; try, match, ...: their blocks
            for child in children(node):
                self._child(child)
            self._event(type(node).__name__, node)

    def _child(self, node):
        if isinstance(node, (cst.BaseStatement, cst.BaseSmallStatement, cst.BaseSuite)):
            self._statement(node)
        elif isinstance(node, cst.BaseExpression):
            self.evaluate(node)
        else:
            for child in children(node):
                self._child(child)

    def _Raise(self, node):
        self.raising += 1
        for child in children(node):
            self._child(child)
        self.raising -= 1

    def _FunctionDef(self, node):
        for part in (*node.decorators, node.params):
            self._child(part)
        class_name, is_module = self.classes[-1] if self.classes else ("", False)
        outer, classes = self.scope, self.classes
        clues = self.clues[id(node)]
        self.scope = function_scope(node, outer, class_name, is_module, self.imports, clues)
        self.scope.scripted |= bool({node.name.value, class_name} & self.scripted)
        self.classes = []
        self._event("function", node)
        self._block(node.body)
        returned = self.scope.returned
        self.results[class_name, node.name.value] = returned[0] if len(returned) == 1 else None
        self.scope, self.classes = outer, classes

    def _Return(self, node):
        if node.value is not None:
            self.evaluate(node.value)
        self.scope.returned.append(node.value)

    def _ClassDef(self, node):
        for part in (*node.decorators, *node.bases):
            self._child(part)
        bases = [(self.imports.resolve(b.value) or dotted(b.value) or "").rsplit(".", 1)[-1] for b in node.bases]
        is_module = any(b.endswith(("Module", "Loss", "Layer", "Net", "Model", "Block")) for b in bases)
        self.classes.append((node.name.value, is_module))
        outer, self.scope = self.scope, Scope(outer=self.scope)
        self.scope.no_grad += "Function" in bases  # torch.autograd.Function: its forward and backward have no graph
        self._block(node.body)
        self.scope = outer
        self.classes.pop()

    def _Assign(self, node):
        value = self.evaluate(node.value)
        for target in node.targets:
            self._bind(target.target, value, node.value, node)
        self._event("Assign", node)

    def _AnnAssign(self, node):
        if node.value is not None:
            self._bind(node.target, self.evaluate(node.value), node.value, node)
            self._event("Assign", node)

    def _AugAssign(self, node):
        value = self.evaluate(node.value)
        old = self.evaluate(node.target)
        name = OPERATORS.get(getattr(cst, type(node.operator).__name__.removesuffix("Assign"), None))
        if name and (old.tensor or value.tensor):
            op = Op(name, node, node.target, [node.value], {}, "operator", inplace=old.tensor)
            new = of_op(op, [old, value], self.imports, not self.scope.wide)
            self._values[id(node)] = new
            self._operation(op)
            if isinstance(node.target, cst.Name):
                self.scope.bind(node.target.value, new)
        if isinstance(node.target, cst.Subscript):
            self._event("store", (node.target, node))

    def _NamedExpr(self, node):
        value = self.evaluate(node.value)
        self._bind(node.target, value, node.value, node)
        return value

    def _loop(self, node):
        self.scope.loops += 1
        self._block(node.body)
        self.scope.loops -= 1
        if node.orelse is not None:
            self._statement(node.orelse)

    def _With(self, node):
        scope, before = self.scope, (self.scope.no_grad, self.scope.autocast, self.scope.wide, self.scope.on_cpu)
        for item in node.items:
            self.evaluate(item.item)
            call = item.item if isinstance(item.item, cst.Call) else None
            name = (self.imports.resolve(call.func) or dotted(call.func) or "") if call else ""
            last = name.rsplit(".", 1)[-1]
            if last in ("no_grad", "inference_mode"):
                scope.no_grad += 1
            elif last == "enable_grad":
                scope.no_grad = 0
            elif last == "autocast":
                enter_autocast(scope, call, 1)
            if item.asname is not None:
                self._bind(item.asname.name, NOTHING, None, node)
        self._block(node.body)
        scope.no_grad, scope.autocast, scope.wide, scope.on_cpu = before

    # ---- rules

    def _operation(self, op):
        for rule in self._by_op.get(op.name, ()):
            rule.operation(op, self)
        if op.name in SAVES_INPUT and not op.inplace and not self.scope.no_grad:
            operands = [n for n in (op.input, *op.args) if n is not None and self.value(n).tensor]
            if len(operands) > 1 or op.name not in ("mul", "div"):  # x * number saves no operand
                for n in operands:
                    if isinstance(n, cst.Name) and not self.value(n).constant:
                        self.scope.saved[n.value] = op.name

    def _event(self, name, node):
        for rule in self._by_event.get(name, ()):
            rule.visit(name, node, self)

"""One walk over a file in the order in which it runs: values are inferred on the way, and the rules are called."""

import re

import libcst as cst

from safeops.lint.binding import Binding
from safeops.lint.calls import Calls
from safeops.lint.context import Context
from safeops.lint.expressions import Expressions
from safeops.lint.layers import fields
from safeops.lint.results import Results
from safeops.lint.scope import Scope, asked_about, enter_autocast, function_scope
from safeops.lint.survey import survey
from safeops.lint.syntax import OPERATORS, Op, children, descendants, dotted
from safeops.lint.values import FOREIGN, NOTHING, of_op

# A condition of this kind is about what runs once, or on demand: `if self.verbose`, `if not self._checked`.
ON_DEMAND = re.compile(
    r"verbose|debug|check|validate|sanity|profil|logging|^_?log_|(^|_)stats|warned|initiali[sz]ed", re.IGNORECASE
)
# Whose backward needs the operands.
SAVES_INPUT = set(
    """pow square log log2 log10 log1p mul div matmul bmm mm abs sin cos cosh sinh atan atan2 acos asin norm
    mse_loss softplus logsigmoid gelu silu lgamma erf cosine_similarity cdist""".split()
)


class Walk(Binding, Calls, Context, Expressions, Results):
    """The rules see this object: values, the scope they are in, and `report`."""

    def __init__(self, module, imports, rules, code, possible=False, scripted=frozenset()):
        self.module, self.imports, self.code = module, imports, code
        self.possible, self.scripted = possible, scripted
        self.scope, self.classes = Scope(), []
        self.reports = {}  # (code, id of node) -> Report: a later report about the same node replaces the earlier
        self.notes = {}  # of rules, between two of their calls
        self.results = {}  # (class, function) -> the one expression that it returns
        self.fields = fields(module)
        self.raising = 0  # inside a raise statement: it runs once
        self.body = None  # of the function that the walk is in
        self._values = {}
        self._by_op, self._by_event = {}, {}
        for rule in rules:
            for name in rule.ops:
                self._by_op.setdefault(name, []).append(rule)
            for event in rule.events:
                self._by_event.setdefault(event, []).append(rule)

    def run(self):
        self.clues, self.helpers = survey(self.module, self.imports, self.scripted)
        own = self.clues[id(self.module)]  # a script whose training loop is in no function
        self.scope.step, self.scope.wide = own.backward, self.imports.statistics
        self.scope.used = own.tensors | own.arrays
        self._event("module", self.module)
        self._block(self.module.body)
        return list(self.reports.values())

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
        else:  # Expr, Raise, Del, ...: their expressions; try, match, ...: the blocks in them
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
        outer, classes, body = self.scope, self.classes, self.body
        self.scope = function_scope(node, outer, class_name, is_module, self.imports, self.clues[id(node)])
        self.classes = []
        self.body = node.body
        self._event("function", node)
        self._block(node.body)
        self._keep_result(node.name.value, class_name)
        self.scope, self.classes, self.body = outer, classes, body

    def _ClassDef(self, node):
        for part in (*node.decorators, *node.bases):
            self._child(part)
        bases = [(self.imports.resolve(b.value) or dotted(b.value) or "").rsplit(".", 1)[-1] for b in node.bases]
        is_module = any(b.endswith(("Module", "Loss", "Layer", "Net", "Model", "Block")) for b in bases)
        self.classes.append((node.name.value, is_module))
        outer, self.scope = self.scope, Scope(outer=self.scope)
        self.scope.no_grad += "Function" in bases  # torch.autograd.Function: its forward and backward have no graph
        # what prepares data: they are fp32 before a model has them
        self.scope.wide += any(b.endswith(("Transform", "Dataset")) or "Augment" in b for b in bases)
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
            new = of_op(op, [old, value], self.imports)
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

    def _If(self, node):
        names = {n.value for n in descendants(node.test) if isinstance(n, cst.Name)}
        rare = any(ON_DEMAND.search(name) and not self.scope.get(name).tensor for name in names)
        self.scope.rare += rare
        self._test(node.test)
        waited = any(self.reported(code, n) for n in descendants(node.test) for code in ("SO301", "SO303"))
        name, is_tensor = self._asked_for_a_tensor(node.test)
        self.scope.rare += waited  # what the branch reads has arrived by then
        self._branch(node.body, None if is_tensor else name)
        self.scope.rare -= rare + waited
        if node.orelse is not None:
            self._branch(node.orelse, name if is_tensor else None)
        elif rare and isinstance(node.test, cst.UnaryOperation) and _returns(node.body):  # if not with_stats: return
            self.scope.rare += 1

    def _branch(self, node, name):
        """A branch in which `name` is no tensor."""
        before = self.scope.names.get(name)
        if before is not None:
            self.scope.names[name] = FOREIGN
        self._statement(node)
        if before is not None and self.scope.names[name] is FOREIGN:
            self.scope.names[name] = before

    def _asked_for_a_tensor(self, test):
        """(x, whether it is a tensor) of `torch.is_tensor(x)`, `isinstance(x, float)`, `not isinstance(x, Tensor)`."""
        inverted = isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not)
        call = test.expression if inverted else test
        name = (dotted(call.func) or "").rpartition(".")[2] if isinstance(call, cst.Call) else ""
        if name == "is_tensor" and len(call.args) == 1:
            return dotted(call.args[0].value), not inverted
        if name != "isinstance" or len(call.args) != 2:
            return None, False
        return dotted(call.args[0].value), ("Tensor" in self.text(call.args[1].value)) != inverted

    def _Else(self, node):
        self._block(node.body)

    def _While(self, node):
        self._test(node.test)
        self._loop(node)

    def _Assert(self, node):
        self._test(node.test)
        self.raising += 1
        if node.msg is not None:
            self.evaluate(node.msg)
        self.raising -= 1

    def _loop(self, node):
        self.scope.loops += 1
        self._event("loop", node)
        self._block(node.body)
        self.scope.loops -= 1
        if node.orelse is not None:
            self._statement(node.orelse)

    def _With(self, node):
        scope, before = self.scope, (self.scope.no_grad, self.scope.autocast, self.scope.wide)
        for item in node.items:
            self.evaluate(item.item)
            call = item.item if isinstance(item.item, cst.Call) else None
            name = (self.imports.resolve(call.func) or dotted(call.func) or "") if call else ""
            last = name.rsplit(".", 1)[-1]
            off = last == "set_grad_enabled" and "False" in [dotted(a.value) for a in call.args]
            if off or last in ("no_grad", "inference_mode"):
                scope.no_grad += 1
            elif last in ("autocast", "maybe_autocast"):
                enter_autocast(scope, call, 1)
            elif last == "fp32_region":
                scope.wide += 1
            if item.asname is not None:
                self._bind(item.asname.name, NOTHING, None, node)
        self._block(node.body)
        scope.no_grad, scope.autocast, scope.wide = before

    def _test(self, test):
        self.evaluate(test)
        self._event("test", test)
        self.scope.checked |= asked_about(test)

    # ---- rules

    def _operation(self, op):
        for rule in self._by_op.get(op.name, ()):
            rule.operation(op, self)
        if op.name in SAVES_INPUT and not op.inplace and not self.scope.no_grad:
            operands = [n for n in (op.input, *op.args) if n is not None and self.value(n).tensor]
            if len(operands) > 1 or op.name not in ("mul", "div"):  # times a number nothing is saved
                for n in operands:
                    if isinstance(n, cst.Name) and not self.value(n).constant:
                        self.scope.saved[n.value] = op.name

    def _event(self, name, node):
        for rule in self._by_event.get(name, ()):
            rule.visit(name, node, self)


def _returns(block):
    last = block.body[-1]
    return isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], cst.Return)

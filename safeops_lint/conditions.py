"""Conditions: facts about the names in one, and when its branches run."""

import re

import libcst as cst

from safeops_lint.syntax import children, descendants, dotted
from safeops_lint.values import FOREIGN

# A condition of this kind is about what runs once, or on demand: `if self.verbose`, `if not self._checked`.
ON_DEMAND = re.compile(
    r"verbose|debug|check|validate|sanity|profil|logging|^_?log_|(^|_)stats|warned|initiali[sz]ed", re.IGNORECASE
)
# Attributes and calls that say nothing of a tensor's values.
SHAPES = set("shape dtype device ndim requires_grad is_cuda is_leaf layout training".split())
ASK_NO_VALUE = set("isinstance issubclass hasattr callable len type id is_tensor is_available".split())
ASK_NO_VALUE |= set("size dim numel nelement ndimension is_floating_point is_complex is_contiguous".split())


class Conditions:
    """Mixed into Walk."""

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

    def _test(self, test):
        self.evaluate(test)
        self._event("test", test)
        asked = asked_about(test) - {"self", *self.imports.names}
        for name in list(asked):  # where `some & valid` has an element, valid has one
            op = self.scope.get(name).op
            while op is not None and op.name in ("float", "to", "bitwise_and"):
                asked |= {n.value for n in (op.input, *op.args) if isinstance(n, cst.Name)}
                op = self.op(op.input)
        self.scope.checked |= asked


def asked_about(test):
    """The names whose values a condition depends on: none in `x is not None`, `isinstance(x, T)`, `x.dim() == 3`."""
    names, todo = set(), [test]
    while todo:
        node = todo.pop()
        if isinstance(node, cst.Comparison):
            if any(isinstance(c.operator, (cst.Is, cst.IsNot, cst.In, cst.NotIn)) for c in node.comparisons):
                continue
            if any(isinstance(s, cst.SimpleString) for s in (node.left, *(c.comparator for c in node.comparisons))):
                continue
        elif isinstance(node, cst.Call):
            if (dotted(node.func) or getattr(getattr(node.func, "attr", None), "value", "")).rsplit(".", 1)[
                -1
            ] in ASK_NO_VALUE:
                continue
        elif isinstance(node, cst.Attribute):
            if node.attr.value in SHAPES:
                continue
            todo.append(node.value)  # not the attribute's name
            continue
        elif isinstance(node, cst.Name):
            names.add(node.value)
        todo.extend(children(node))
    return names


def _returns(block):
    last = block.body[-1]
    return isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], cst.Return)

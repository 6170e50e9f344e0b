"""Handles conditions (if, while, assert): finds the names that they ask about, and branches that rarely run."""

import re

import libcst as cst

from safeops_lint.syntax import children, descendants

# Names in conditions whose branch runs once, or only on demand: `if self.verbose`, `if not self._checked`.
ON_DEMAND = re.compile(
    r"verbose|debug|check|validate|sanity|profil|logging|^_?log_|(^|_)stats|warned|initiali[sz]ed", re.IGNORECASE
)
# Attributes and calls that do not depend on a tensor's values.
SHAPES = set("shape dtype device ndim requires_grad is_cuda is_leaf layout training".split())
ASK_NO_VALUE = set("isinstance issubclass hasattr callable len type id is_tensor is_available".split())
ASK_NO_VALUE |= set("size dim numel nelement ndimension is_floating_point is_complex is_contiguous".split())


class Conditions:
    """The part of Walk (walk.py) that handles conditions."""

    def _If(self, node):
        names = {n.value for n in descendants(node.test) if isinstance(n, cst.Name)}
        rare = any(ON_DEMAND.search(name) and not self.scope.get(name).tensor for name in names)
        self.scope.rare += rare
        self._test(node.test)
        self._statement(node.body)
        self.scope.rare -= rare
        if node.orelse is not None:
            self._statement(node.orelse)

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
        self.scope.checked |= asked_about(test) - {"self", *self.imports.names}


def asked_about(test):
    """Returns the names on whose values a condition depends: none for `x is not None` or `x.dim() == 3`."""
    names, todo = set(), [test]
    while todo:
        node = todo.pop()
        if isinstance(node, cst.Comparison):
            if any(isinstance(c.operator, (cst.Is, cst.IsNot, cst.In, cst.NotIn)) for c in node.comparisons):
                continue
            if any(isinstance(s, cst.SimpleString) for s in (node.left, *(c.comparator for c in node.comparisons))):
                continue
        elif isinstance(node, cst.Call):
            if getattr(getattr(node.func, "attr", node.func), "value", "") in ASK_NO_VALUE:
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

"""The part of the walk that rules use: an expression's Value and source text, the kind of code it is in, `report`."""

import dataclasses
import functools
import operator
import re

import libcst as cst

from safeops_lint.memory import Memory
from safeops_lint.promotion import Promotion
from safeops_lint.syntax import comments, descendants, number
from safeops_lint.tables import REDUCTIONS
from safeops_lint.values import NOTHING

TO_HALF = re.compile(r"\.half\(|torch\.(half|float16)\b")
AUTOCAST = re.compile(r"autocast\([^()]*\)")
# Rules about the values of arguments. In a private function their findings do not count as likely, only as possible:
# its callers in the file may have made the values safe.
PREPARED = {"SO201", "SO202", "SO204", "SO205", "SO206", "SO207", "SO210"}
PARENTHESIZED = (cst.Tuple, cst.GeneratorExp, cst.NamedExpr, cst.Yield)  # keep their parentheses as an argument
ARITHMETIC = {cst.Add: "add", cst.Subtract: "sub", cst.Multiply: "mul", cst.Divide: "truediv", cst.Power: "pow"}


@dataclasses.dataclass(slots=True)
class Report:
    rule: object
    node: cst.CSTNode
    message: str
    fix: object  # [(node, text), ...] or None
    imports_safeops: bool
    last: cst.CSTNode
    likely: bool


class Context:
    """The part of Walk (walk.py) that rules use."""

    def value(self, node):
        return self._values.get(id(node), NOTHING)

    def op(self, node):
        """Returns the Op that made the value of an expression, which may be a name; None if that is not known."""
        return self.value(node).op if node is not None else None

    def number(self, node, depth=0):
        """The number that an expression has as its value, also through names and defaults (`self.eps**2`), or None."""
        if node is None or depth > 5:
            return None
        value = number(node)
        if value is not None:
            return value
        if isinstance(node, cst.BinaryOperation) and type(node.operator) in ARITHMETIC:
            parts = [self.number(n, depth + 1) for n in (node.left, node.right)]
            try:
                return None if None in parts else getattr(operator, ARITHMETIC[type(node.operator)])(*parts)
            except (ArithmeticError, TypeError):
                return None
        made = self.value(node).node if isinstance(node, (cst.Name, cst.Attribute, cst.Subscript)) else None
        return self.number(made, depth + 1) if made is not node else None

    def text(self, node):
        """The source of an expression, with its own parentheses."""
        return self.module.code_for_node(node)

    def argument(self, node):
        """The source of an expression as an argument of a call: without outer parentheses, which it does not need."""
        needless = getattr(node, "lpar", ()) and not isinstance(node, PARENTHESIZED) and not comments(node)
        return self.text(node.with_changes(lpar=(), rpar=()) if needless else node)

    def report(self, rule, node, message, fix=None, *, likely=True, imports=True, covers=(), last=None):
        """Keep a report on `node`. fix: [(node, new text)], dropped if a comment would be lost. likely: False if a
        caller or the data may well prevent the problem; such a report is shown only if the rule was selected. imports:
        the fix calls safeops. covers: [(code, node)] of reports that this one replaces. last: a comment that silences
        the report may also be on the last line of this node."""
        prepared = self.private and rule.code in PREPARED
        likely = likely and not (prepared or self.imports.tests)
        if fix and sum(comments(old) for old, _ in fix) > sum(_count_comments(new) for _, new in fix):
            fix = None
        if imports and self.scope.scripted:
            fix = None
        for code, covered in covers:
            self.reports.pop((code, id(covered)), None)
        self.reports[rule.code, id(node)] = Report(
            rule, node, message, fix, imports and bool(fix), last or node, likely
        )

    @functools.cached_property
    def promotion(self):
        return Promotion(self)

    @functools.cached_property
    def memory(self):
        return Memory(self)

    def reported(self, code, node):
        return (code, id(node)) in self.reports

    @functools.cached_property
    def casts_to_half(self):
        """True if the file casts to fp16 itself. If only autocast does, pow, sums and losses run in fp32."""
        return TO_HALF.search(AUTOCAST.sub("", self.code)) is not None

    @property
    def training(self):
        """True if this code computes a loss or a training step, with an autograd graph."""
        return (self.scope.loss or self.scope.step) and not self.scope.no_grad and not self.scope.metric

    @property
    def entered(self):
        """True if a training step calls this function. False for a helper, whose caller may make its arguments safe."""
        named = self.scope.name in ("forward", "__call__") or "loss" in self.scope.name.lower()
        return named or not (self.scope.class_name or self.scope.helper)

    @property
    def private(self):
        """True if the function's name begins with one underscore, so that only this file should call it."""
        return self.scope.name.startswith("_") and not self.scope.name.startswith("__")

    @property
    def stepping(self):
        """True if this code is part of every training step: a loss, a function that a loss calls, or a module; not a
        metric."""
        scope = self.scope
        part = scope.loss and scope.helper != "formula" or scope.step or scope.is_module
        return part and not (scope.metric or scope.for_host)

    @property
    def computing(self):
        """True if `training`, or if this code computes a metric, whose values matter even if it has no gradients."""
        return self.training or self.scope.metric

    def checked(self, node):
        """True if an earlier condition asked about a name in this expression, such as `if n > 0`, or about the tensor
        whose reduction the expression is."""
        op = self.op(node)
        of = op.input if op is not None and op.name in REDUCTIONS and isinstance(op.input, cst.Name) else None
        return any(self.scope.knows(name) for name in self.names_in(node) | self.names_in(of))

    def names_in(self, node):
        return {n.value for n in descendants(node) if isinstance(n, cst.Name)} if node is not None else set()


def _count_comments(text):
    """The number of comments in the text of an expression, which is parsed in parentheses as it may span lines."""
    return comments(cst.parse_expression(f"({text}\n)")) if "#" in text else 0

"""SO3xx: where a loss makes the CPU wait for the GPU."""

import re

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.syntax import descendants, dotted, number

ENUM = re.compile(r"(\w+\.)*[A-Z]\w*\.[A-Z][A-Z_\d]*")
INDEX = re.compile(r"(^|_)(i|j|idx|index|indices|indexes)(_|$)")  # a matcher's are on the CPU, as scipy made them


def _of_interest(walk):
    """In a loss itself, but for what it does without a graph, once or on demand: statistics and checks, on purpose."""
    scope = walk.scope
    return scope.loss and not (scope.metric or scope.helper or scope.no_grad or scope.rare or scope.for_host)


class Fetch(Rule):
    code, name = "SO301", "fetch-in-loss"
    what = """
    `.item()`, `.cpu()`, `.tolist()`, `.numpy()`, `float(t)` or `int(t)` in a loss: the CPU waits until the GPU has
    caught up.
    """
    why = "Every step stalls, a CUDA graph cannot capture it, and what comes back has no gradient."
    fix = """
    Keep the value as a 0-dim tensor: `torch.where`, `clamp(min=...)` and the `denominator=` of safeops' losses take
    one.
    """
    events = ("Call", "Return")

    def visit(self, event, node, walk):
        if not _of_interest(walk) or walk.raising:
            return
        if event == "Return":
            for part in descendants(node.value) if _on_host(node.value, walk) else ():
                walk.reports.pop((self.code, id(part)), None)
            return
        func = node.func
        host = (walk.imports.resolve(func) or "").startswith(("scipy.", "numpy.", "sklearn."))
        for argument in node.args if host else ():  # that library reads it on the host
            walk.reports.pop((self.code, id(argument.value)), None)
        if isinstance(func, cst.Attribute) and not walk.imports.resolve(func):
            value = walk.value(func.value)
            known = value.tensor or not dotted(func.value)
            if func.attr.value == "item" and not node.args and known and not (value.foreign or value.host):
                covers = [("SO301", func.value)]
                message = ".item() in a loss waits for the GPU; keep the tensor"
                walk.report(self, node, message, likely=not _of_indices(func.value, walk), covers=covers)
            elif func.attr.value in ("cpu", "tolist") and value.tensor and not (value.constant or value.host):
                message = f".{func.attr.value}() in a loss waits for the GPU; keep the tensor"
                walk.report(self, node, message, likely=not _of_indices(func.value, walk))
            elif func.attr.value == "numpy" and walk.reports.pop((self.code, id(func.value)), None):
                # (alone it raises of a tensor that is not on the CPU) what goes on in numpy cannot stay a tensor
                message = ".cpu().numpy() in a loss waits for the GPU; keep the tensor"
                walk.report(self, node, message, likely=False)
        elif isinstance(func, cst.Name) and func.value in ("float", "int") and len(node.args) == 1:
            value = walk.value(node.args[0].value)
            if value.tensor and not (value.constant or value.host):
                walk.report(self, node, f"{func.value}() of a tensor in a loss waits for the GPU; keep the tensor")


def _on_host(returned, walk):
    """True if all that a function returns is a number or an array: no loss that trains, and so its caller wants it."""
    if isinstance(returned, cst.Tuple):
        parts = [e.value for e in returned.elements]
        return all(walk.value(n).foreign for n in parts) and not all(number(n) is not None for n in parts)
    return returned is not None and not walk.value(returned).tensor


def _of_indices(node, walk):
    """`idx[0]`, `indices`"""
    return isinstance(node, (cst.Name, cst.Subscript)) and any(INDEX.search(name) for name in walk.names_in(node))


class Print(Rule):
    code, name = "SO302", "print-in-loss"
    what = "Printing or formatting a tensor in a loss copies it to the host first: the CPU waits for the GPU."
    why = "As `.item()`, at every step, and for the formatting besides."
    fix = "Return the value (detached) beside the loss, and print it every hundred steps."
    events = ("Call", "FormattedString")

    def visit(self, event, node, walk):
        if not _of_interest(walk) or walk.raising:
            return
        if event == "Call":
            if dotted(node.func) != "print":
                return
            parts = [a.value for a in node.args]
        else:
            parts = [p.expression for p in node.parts if isinstance(p, cst.FormattedStringExpression)]
        there = [p for p in parts if walk.value(p).tensor and not (walk.value(p).host or walk.value(p).constant)]
        if any(walk.op(p) is not None or event == "Call" for p in there):
            walk.report(self, node, "formatting a tensor in a loss waits for the GPU; return it detached instead")


class Truth(Rule):
    code, name = "SO303", "tensor-condition-in-loss"
    what = "`if`, `while`, `assert` or `not` on a tensor in a loss reads it on the host: the CPU waits for the GPU."
    why = "A wait at every step, a graph break under torch.compile, and no CUDA graph."
    fix = """
    `torch.where` on the device; for an empty mask `safeops.masked_mean`, which has `empty=`; checks belong in a
    debug mode.
    """
    events = ("test",)

    def visit(self, event, node, walk):
        if not _of_interest(walk):
            return
        for leaf in _leaves(node):
            value = walk.value(leaf)
            known = value.op is not None or value.mask == "bool"
            if value.tensor and known and not value.constant and not _by_python(leaf, walk):
                walk.report(self, leaf, "a condition on a tensor in a loss waits for the GPU; use torch.where")


def _leaves(node):
    if isinstance(node, cst.BooleanOperation):
        return [*_leaves(node.left), *_leaves(node.right)]
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        return _leaves(node.expression)
    return [node]


def _by_python(node, walk):
    """Compared with a string, None or a bool: then it is no tensor, whatever its name says."""
    if not isinstance(node, cst.Comparison):
        return False
    sides = [node.left, *(c.comparator for c in node.comparisons)]
    if all(
        isinstance(s, cst.Name) and len(s.value) == 1 and walk.op(s) is None or number(s) is not None for s in sides
    ):
        return True  # `p > 0`: an exponent, a weight
    equal = all(isinstance(c.operator, (cst.Equal, cst.NotEqual)) for c in node.comparisons)
    if equal and any(ENUM.fullmatch(dotted(s) or "") for s in sides):
        return True  # `source == Source.STUDENT`
    if equal and not any(walk.value(s).foreign or walk.op(s) is not None for s in sides):
        return True  # two names: `kind == label`
    return any(
        isinstance(s, (cst.SimpleString, cst.Tuple, cst.List)) or dotted(s) in ("None", "True", "False") for s in sides
    ) or (len(node.comparisons) > 1 and any(isinstance(n, cst.Attribute) for n in descendants(node)))


RULES = (Fetch, Print, Truth)

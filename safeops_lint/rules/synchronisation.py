"""SO301 to SO303: code in a loss that makes the CPU wait for the GPU."""

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.syntax import dotted


def _of_interest(walk):
    """True in a loss itself, not in a helper. False in a metric, without a graph, and in branches that run once or on
    demand: statistics and checks there wait on purpose."""
    scope = walk.scope
    return scope.loss and not (scope.metric or scope.helper or scope.no_grad or scope.rare or scope.for_host)


class Fetch(Rule):
    code, name = "SO301", "fetch-in-loss"
    what = """`.item()`, `.cpu()`, `.tolist()`, `.numpy()`, `float(t)` or `int(t)` in a loss: the CPU waits until the
    GPU has caught up."""
    why = "Every step stalls, a CUDA graph cannot capture it, and what comes back has no gradient."
    fix = """Keep the value as a 0-dim tensor: `torch.where`, `clamp(min=...)` and the `denominator=` of safeops' losses
    take one."""
    events = ("Call",)

    def visit(self, event, node, walk):
        if not _of_interest(walk) or walk.raising:
            return
        func = node.func
        if isinstance(func, cst.Attribute) and not walk.imports.resolve(func):
            value, name = walk.value(func.value), func.attr.value
            known = value.tensor or name == "item" and not (node.args or dotted(func.value) or value.foreign)
            if name in ("item", "cpu", "tolist") and known and not (value.constant or value.host):
                covers = [(self.code, func.value)]
                walk.report(self, node, f".{name}() in a loss waits for the GPU; keep the tensor", covers=covers)
            elif name == "numpy" and walk.reports.pop((self.code, id(func.value)), None):
                # Only possible: the code that follows computes in numpy, so the value cannot stay a tensor.
                message = ".cpu().numpy() in a loss waits for the GPU; keep the tensor"
                walk.report(self, node, message, likely=False)
        elif isinstance(func, cst.Name) and func.value in ("float", "int") and len(node.args) == 1:
            value = walk.value(node.args[0].value)
            if value.tensor and not (value.constant or value.host):
                walk.report(self, node, f"{func.value}() of a tensor in a loss waits for the GPU; keep the tensor")


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
    fix = """`torch.where` on the device; for an empty mask `safeops.masked_mean`, which has `empty=`; checks belong in
    a debug mode."""
    events = ("test",)

    def visit(self, event, node, walk):
        if not _of_interest(walk):
            return
        for leaf in _leaves(node):
            value = walk.value(leaf)
            known = value.op is not None or value.mask == "bool"
            if value.tensor and known and not (value.constant or _numbers(leaf, walk)):
                walk.report(self, leaf, "a condition on a tensor in a loss waits for the GPU; use torch.where")


def _leaves(node):
    if isinstance(node, cst.BooleanOperation):
        return [*_leaves(node.left), *_leaves(node.right)]
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        return _leaves(node.expression)
    return [node]


def _numbers(node, walk):
    """True for a comparison of plain names, which may be numbers: `p > 0`, `kind == label`."""
    if not isinstance(node, cst.Comparison):
        return False
    return not any(walk.op(s) is not None for s in (node.left, *(c.comparator for c in node.comparisons)))


RULES = (Fetch, Print, Truth)

"""SO406: clipping of gradients, or optimizer steps, before the gradients are divided by the loss scale."""

import re

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.syntax import descendants, dotted

OPTIMIZER = re.compile(r"(^|[._])opt(im\w*)?$", re.IGNORECASE)


def calls(event, node):
    """Returns the calls in a function's body, or at the top level of a module, without those in nested functions and
    classes."""
    body = node.body if event == "function" else node
    return [n for n in descendants(body, stop=(cst.FunctionDef, cst.ClassDef)) if isinstance(n, cst.Call)]


def method(call):
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


class ScaledClip(Rule):
    code, name = "SO406", "clip-of-scaled-gradients"
    what = """`clip_grad_norm_` before `scaler.unscale_` clips gradients that are still multiplied by the loss scale;
    `optimizer.step()` in place of `scaler.step(optimizer)` takes a step by them."""
    why = "At a scale of 65536 every norm is above the bound: all steps become the same tiny length, and nothing warns."
    fix = "`scaler.unscale_(optimizer)` before the clipping; `scaler.step` knows that it was done."
    events = ("function", "module")

    def visit(self, event, node, walk):
        results = calls(event, node)
        back = [n.func.value for n in results if method(n) == "backward"]
        scaled = any(isinstance(n, cst.Call) and method(n) == "scale" for n in back)
        if not scaled or any(method(n) == "unscale_" for n in results):
            return
        stepped = any(method(n) == "step" and n.args for n in results)  # scaler.step(optimizer)
        for call in results:
            owner, _, last = (dotted(call.func) or "").rpartition(".")
            if last in ("clip_grad_norm_", "clip_grad_value_"):
                walk.report(self, call, "these gradients are still scaled; call scaler.unscale_(optimizer) first")
            elif last == "step" and OPTIMIZER.search(owner) and not stepped:
                walk.report(self, call, "a step by gradients that are still scaled; call scaler.step(optimizer)")


RULES = (ScaledClip,)

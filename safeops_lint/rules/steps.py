"""SO405 and SO406: steps in half whose optimizer, or whose clipping, sees other numbers than it was written for."""

import re

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.eps import HALF_TINY
from safeops_lint.syntax import descendants, dotted
from safeops_lint.values import dtype_of

OPTIMIZER = re.compile(r"(^|[._])opt(im\w*)?$", re.IGNORECASE)
ADAPTIVE = {f"torch.optim.{name}" for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop")}


def calls(event, node):
    """The calls of a function, or of a script's own lines, but for those of the functions in it."""
    body = node.body if event == "function" else node
    return [n for n in descendants(body, stop=(cst.FunctionDef, cst.ClassDef)) if isinstance(n, cst.Call)]


def method(call):
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


class OptimizerEps(Rule):
    code, name = "SO405", "optimizer-eps-in-half"
    what = "Adam and its kin divide by `sqrt(v) + eps`: for a model in half the default eps, 1e-8, is 0, and so is v."
    why = "The square of a gradient below 2e-4 is 0 in fp16: the first step is 0 / 0, and every weight NaN."
    fix = "Weights in fp32 under autocast, which is what mixed precision means; or `eps=1e-4`."
    events = ("function", "module")

    def visit(self, event, node, walk):
        found = calls(event, node)
        halved = {dotted(n.func.value) for n in found if method(n) == "half" and not n.args} - {None}
        nodes = descendants(node.body if event == "function" else node, stop=(cst.FunctionDef, cst.ClassDef))
        halved |= {
            dotted(n.targets[0].target) for n in nodes if isinstance(n, cst.Assign) and _in_half(n.value, walk)
        } - {None}
        for call in found if halved else ():
            if walk.imports.resolve(call.func) not in ADAPTIVE or not call.args:
                continue
            given = {a.keyword.value: a.value for a in call.args if a.keyword}
            eps = walk.number(given["eps"]) if "eps" in given else 1e-8
            of = {f"{name}.parameters" for name in halved}
            theirs = any(dotted(n.func) in of for n in descendants(call.args[0]) if isinstance(n, cst.Call))
            if theirs and eps is not None and eps < HALF_TINY:
                walk.report(self, call, f"eps={eps:g} is 0 beside weights in half, and the step 0 / 0; give eps=1e-4")


def _in_half(node, walk):
    """`Net().half()`, `Net().to(torch.float16)`"""
    if not isinstance(node, cst.Call):
        return False
    given = (dtype_of(a.value, walk.imports) for a in node.args) if method(node) == "to" else ()
    return method(node) == "half" and not node.args or "half" in given


class ScaledClip(Rule):
    code, name = "SO406", "clip-of-scaled-gradients"
    what = """
    `clip_grad_norm_` before `scaler.unscale_` clips gradients that are still multiplied by the loss scale;
    `optimizer.step()` in place of `scaler.step(optimizer)` takes a step by them.
    """
    why = "At a scale of 65536 every norm is above the bound: all steps become the same tiny length, and nothing warns."
    fix = "`scaler.unscale_(optimizer)` before the clipping; `scaler.step` knows that it was done."
    events = ("function", "module")

    def visit(self, event, node, walk):
        found = calls(event, node)
        scaled = any(
            method(n) == "backward" and isinstance(n.func.value, cst.Call) and method(n.func.value) == "scale"
            for n in found
        )
        if not scaled or any(method(n) == "unscale_" for n in found):
            return
        stepped = any(method(n) == "step" and n.args for n in found)  # scaler.step(optimizer)
        for call in found:
            owner, _, last = (dotted(call.func) or "").rpartition(".")
            if last in ("clip_grad_norm_", "clip_grad_value_"):
                walk.report(self, call, "these gradients are still scaled; call scaler.unscale_(optimizer) first")
            elif last == "step" and OPTIMIZER.search(owner) and not stepped:
                walk.report(self, call, "a step by gradients that are still scaled; call scaler.step(optimizer)")


RULES = (OptimizerEps, ScaledClip)

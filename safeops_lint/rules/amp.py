"""SO401, SO402: losses under autocast."""

import re

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.syntax import dotted


class HalfLoss(Rule):
    code, name = "SO401", "loss-in-half"
    what = """A loss reduced in half: under autocast, `mean` and elementwise arithmetic keep the half of the model's
    output."""
    why = """An fp16 loss ends at 65504 and is multiplied by the scaler's 65536: inf at the first step. Averages lose
    all but three digits."""
    fix = """A loss of safeops, which reads half and returns fp32; or `.float()` on the prediction; or leave autocast
    before the loss (`with torch.autocast("cuda", enabled=False)`)."""
    ops = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss", "gaussian_nll_loss")
    events = ("Assign",)

    def operation(self, op, walk):
        for node in (op.input, *op.args[:1]):
            if node is not None and walk.value(node).half:
                message = f"{op.name} of a tensor that was cast to half; safeops.{op.name} reads half and returns fp32"
                return walk.report(self, op.node, message)

    def visit(self, event, node, walk):
        if not walk.scope.autocast or walk.scope.wide or walk.scope.no_grad or node.value is None:
            return
        target = node.target if isinstance(node, cst.AnnAssign) else node.targets[0].target
        name = dotted(target) or ""
        op = walk.op(node.value)
        while op is not None and op.name in ("div", "mul") and not walk.value(op.args[0]).tensor:
            op = walk.op(op.input)  # skips a factor or divisor, such as `/ accumulation_steps`
        if not re.search(r"loss|criterion|nll|objective", name.lower()) or op is None or op.name not in ("mean", "sum"):
            return
        value = walk.value(op.input)
        if value.wide or value.mask or "dtype" in op.kwargs or not self._arithmetic(value.op, walk):
            return
        walk.report(self, op.node, "this loss is reduced in half under autocast; use a safeops loss, or .float() first")

    def _arithmetic(self, op, walk):
        """True for elementwise arithmetic that is done in half under autocast: a difference or an absolute value, or
        other arithmetic on one of these."""
        if op is None or op.name not in ("sub", "add", "mul", "abs", "neg", "sqrt", "maximum", "relu"):
            return False
        return op.name in ("sub", "abs") or any(self._arithmetic(walk.op(n), walk) for n in (op.input, *op.args))


class BinaryCrossEntropy(Rule):
    code, name = "SO402", "bce-under-autocast"
    what = "`binary_cross_entropy` and `BCELoss` raise under CUDA autocast."
    why = "A sigmoid rounded to half is exactly 0 or 1 much too soon, and its logarithm infinite: torch refuses."
    fix = """`F.binary_cross_entropy_with_logits(x, y)` on what went into the sigmoid; or the loss outside autocast, on
    `.float()`. Where no autocast is in sight, its caller may have entered one: that is told as possible."""
    rewrites = """`F.binary_cross_entropy(torch.sigmoid(x), y)` to `F.binary_cross_entropy_with_logits(x, y)`: equal to
    rounding. Only where an autocast on CUDA is in sight, else the clamp at -100 of torch's logarithm counts"""
    ops = ("binary_cross_entropy",)
    events = ("Call",)
    message = "binary_cross_entropy raises under CUDA autocast; use binary_cross_entropy_with_logits"

    def operation(self, op, walk):
        if op.origin == "method" or not self._may_raise(op.input, walk):
            return
        fix, raises = None, self._raises(walk)
        sigmoid = walk.op(op.input) if op.input is not None else None
        func = op.node.func
        inline = sigmoid is not None and sigmoid.name == "sigmoid" and sigmoid.node is op.input
        if raises and inline and isinstance(func, cst.Attribute):  # if it does not raise, its clamp at -100 matters
            fix = [(func.attr, "binary_cross_entropy_with_logits"), (op.input, walk.text(sigmoid.input))]
        walk.report(self, op.node, self.message, fix, imports=False, likely=raises)

    def _raises(self, walk):
        return bool(walk.scope.autocast) and not walk.scope.on_cpu

    def _may_raise(self, p, walk):
        """True under autocast, and in a loss or a training step, which its caller may run under autocast."""
        if walk.scope.wide:
            return False
        return walk.scope.autocast or walk.training and not walk.value(p).wide

    def visit(self, event, node, walk):
        """Report a call of `criterion`, made by `criterion = nn.BCELoss()`, that may be under autocast."""
        if not node.args or not self._may_raise(node.args[0].value, walk):
            return
        made = walk.value(node.func).node
        if isinstance(made, cst.Call) and walk.imports.resolve(made.func) == "torch.nn.BCELoss":
            message = "BCELoss raises under CUDA autocast; use BCEWithLogitsLoss on the logits"
            walk.report(self, node, message, likely=self._raises(walk))


RULES = (HalfLoss, BinaryCrossEntropy)

"""SO212: variances computed as E[x^2] - E[x]^2, a difference of two nearly equal numbers."""

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.squares import squared, wide
from safeops_lint.syntax import operation
from safeops_lint.tables import SHAPING

AVERAGES = {"sum", "mean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "conv1d", "conv2d", "conv3d", "nansum", "nanmean"}


class Variance(Rule):
    code, name = "SO212", "difference-of-squares-variance"
    what = "`mean(x**2) - mean(x)**2` cancels: the variance of data far from 0 is noise, negative, or 0."
    why = """Two nearly equal numbers are subtracted: in fp32 nothing is left where the mean is 4000 times the spread,
    in fp16 where it is 30 times. The square root of a negative one is NaN."""
    fix = "`safeops.masked_var(x, correction=0)`, `x.var()`; for SSIM `safeops.ssim`, which does not cancel."
    ops = ("sub",)

    def operation(self, op, walk):
        if len(op.args) != 1 or squared(op.args[0], walk) is None or not self._average(op.input, walk):
            return
        made = walk.op(op.input)
        window = made is None or made.name.startswith(("conv", "avg_pool"))
        use = "safeops.ssim, or .float() first" if window else "safeops.masked_var"
        covers = [("SO201", op.input if made is None else made.node)]
        message = f"a variance as E[x^2] - E[x]^2 cancels; use {use}"
        walk.report(self, op.node, message, covers=covers, likely=not wide(op, walk))

    def _average(self, node, walk, depth=0):
        """True if an expression averages squares: `(x**2).mean()`, `blur(x * x)`, `F.conv2d(x.pow(2), window)`, also
        through a name."""
        if depth > 4:
            return False
        node = walk.value(node).node if isinstance(node, cst.Name) else node
        if not isinstance(node, cst.Call) or not node.args and not isinstance(node.func, cst.Attribute):
            return False
        op = operation(node, walk.imports)
        if op is not None and op.name in SHAPING:
            return self._average(op.input, walk, depth + 1)
        if op is not None and op.name in AVERAGES:
            return squared(op.input, walk) is not None
        known = op is not None and op.origin != "method"  # a function of torch that does not average
        return not known and bool(node.args) and squared(node.args[0].value, walk) is not None


RULES = (Variance,)

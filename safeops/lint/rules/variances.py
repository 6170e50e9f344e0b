"""SO212: variances and covariances as a difference of two nearly equal numbers."""

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.rules.squares import squared, tensors, through, wide
from safeops.lint.syntax import operation
from safeops.lint.tables import SHAPING

AVERAGES = {"sum", "mean", "avg_pool1d", "avg_pool2d", "avg_pool3d", "conv1d", "conv2d", "conv3d", "nansum", "nanmean"}


def factors(node, walk):
    """The texts of x and y of `x * y`, sorted; None of anything else."""
    op = walk.op(node)
    pair = tensors(op, walk) if op is not None and op.name == "mul" else []
    return sorted(walk.text(n) for n in pair) if len(pair) == 2 else None


def kind(average, walk):
    """Which average it is, whatever it is of: of covariances the dims and windows agree."""
    given = {**dict(enumerate(average.args)), **average.kwargs}
    return average.name, {name: walk.text(node) for name, node in given.items()}


def averaged(node, walk):
    """(`factors` of what is averaged, the kind) of `mean(x) * mean(y)`; None of anything else."""
    op = walk.op(node)
    pair = [through(n, walk) for n in tensors(op, walk)] if op is not None and op.name == "mul" else []
    if len(pair) < 2 or any(p is None or p.name not in AVERAGES for p in pair):
        return None
    kinds = [kind(p, walk) for p in pair]
    return (sorted(walk.text(p.input) for p in pair), kinds[0]) if kinds[0] == kinds[1] else None


class Variance(Rule):
    code, name = "SO212", "difference-of-squares-variance"
    what = """
    `mean(x**2) - mean(x)**2` cancels: of data far from 0 the variance is noise, negative, or 0. So does the covariance
    `mean(x * y) - mean(x) * mean(y)`.
    """
    why = """
    Two nearly equal numbers are subtracted: in fp32 nothing is left where the mean is 4000 times the spread, in fp16
    where it is 30 times. The square root of a negative one is NaN.
    """
    fix = """
    `safeops.masked_var(x, correction=0)`, `x.var()`; for SSIM `safeops.ssim`, which does not cancel; for a covariance
    the mean of `(x - mean(x)) * (y - mean(y))`.
    """
    outcome = "the variance of numbers around 4096 with spread 0.5 is not 0.25"
    bad = """
    def spread_loss(x):
        return (x**2).mean() - x.mean() ** 2
    """
    good = """
    def spread_loss(x):
        return safeops.masked_var(x, correction=0)
    """
    ops = ("sub",)

    def operation(self, op, walk):
        if len(op.args) != 1:
            return
        square = self._is_square(op.args[0], walk)
        means = None if square else averaged(op.args[0], walk)
        if not (square or means) or not self._average(op.input, means, walk):
            return
        made = walk.op(op.input)
        if means and made is not None and made.name in ("sum", "nansum"):  # an intersection, less that of chance
            return
        covers = [("SO201", op.input if made is None else made.node)]
        window = made is None or made.name.startswith(("conv", "avg_pool"))
        formula = "variance as E[x^2] - E[x]^2" if square else "covariance as E[xy] - E[x] E[y]"
        use = "safeops.masked_var" if square else "the mean of (x - mean(x)) * (y - mean(y))"
        message = f"a {formula} cancels; use {'safeops.ssim, or .float() first' if window else use}"
        walk.report(self, op.node, message, covers=covers, likely=not wide(op, walk))

    def _is_square(self, node, walk):
        if squared(node, walk) is not None:
            return True
        op = walk.op(node)  # mean ** 2 / n
        return op is not None and op.name == "div" and squared(op.input, walk) is not None

    def _average(self, node, means, walk, depth=0):
        """`(x**2).mean()`, `blur(x * x)`, `F.conv2d(x.pow(2), window)`, also through names; of `means` the product."""
        if depth > 4:
            return False
        node = walk.value(node).node if isinstance(node, cst.Name) else node
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Divide, cst.Multiply)):
            return self._average(node.left, means, walk, depth + 1)
        if not isinstance(node, cst.Call) or not node.args and not isinstance(node.func, cst.Attribute):
            return False
        op = operation(node, walk.imports)
        if op is not None and op.name in SHAPING:
            return self._average(op.input, means, walk, depth + 1)
        if op is not None and op.name in AVERAGES:
            return (factors(op.input, walk), kind(op, walk)) == means if means else squared(op.input, walk) is not None
        known = op is not None and op.origin != "method"  # another function of torch's
        return not (known or means) and bool(node.args) and squared(node.args[0].value, walk) is not None


RULES = (Variance,)

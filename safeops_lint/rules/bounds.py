"""The range of a value: whether it can be NaN or inf, as far as the code shows."""

import math
import re

from safeops_lint.syntax import dotted
from safeops_lint.tables import REDUCTIONS, SHAPING

SELECTED = {"masked_fill", "where", "nan_to_num", "index"}  # operations that can replace or drop NaN
POLYNOMIAL = set("add sub mul neg pow clamp clamp_min clamp_max minimum maximum relu abs square to float".split())
LABELS = re.compile(r"(^|_)(cdf|labels?|one_?hot|ids?|idx|indices|instances?)$", re.IGNORECASE)  # integers, or <= 1
BOUNDED = set("sigmoid softmax tanh one_hot rand rand_like sign cosine_similarity normalize nll_loss".split())


def fills_inf(op, walk):
    """True for `masked_fill(mask, -inf)`, `torch.where(mask, x, -inf)`, `x[mask] = -inf`."""
    return op is not None and op.name in SELECTED and any(walk.number(n) == -math.inf for n in op.args)


def finite(node, walk, depth=0, *, cleaned=False):
    """True if a value counts as finite: a probability, a label, or computed from these and numbers alone. cleaned: also
    True if NaN and inf were replaced in it, which may leave large numbers."""
    value = walk.value(node)
    if value.foreign or value.mask or value.constant:
        return True
    name, op = dotted(node) or "", value.op
    if fills_inf(op, walk):
        return False
    if cleaned and (name in walk.scope.filled or op is not None and op.name in SELECTED):
        return True
    if op is None or op.name in BOUNDED:
        return op is not None or bool(LABELS.search(name))
    if depth > 6 or op.name not in POLYNOMIAL | SHAPING | REDUCTIONS:
        return False
    return all(finite(n, walk, depth + 1, cleaned=cleaned) for n in (op.input, *op.args) if walk.value(n).tensor)

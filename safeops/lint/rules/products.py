"""SO105: products with a mask."""

import re

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.syntax import dotted
from safeops.lint.values import REDUCTIONS, SHAPING


class TimesMask(Rule):
    code, name = "SO105", "times-mask"
    what = "`x * mask` does not remove what it masks: NaN * 0 and inf * 0 are NaN, in the value and in the gradient."
    why = """
    The masked-out places are those most likely to hold garbage: unmeasured targets, padding, 0 / 0. In half, the
    sum of a mask beyond 65504 elements is inf besides.
    """
    fix = """
    `safeops.masked_fill(x, ~mask, 0)`, or hand the mask over: `safeops.masked_sum(x, mask)`,
    `safeops.masked_mean(x, mask)`.
    """
    outcome = "the loss is NaN because of an element that is masked out"
    rewrites = "`x * mask` to `safeops.masked_fill(x, ~mask, 0)` where the mask is certainly boolean"
    bad = """
    def masked_loss(prediction, target):
        mask = target.isfinite()
        error = (prediction - target).abs() * mask
        return error.sum() / mask.sum().clamp(min=1)
    """
    good = """
    def masked_loss(prediction, target):
        return safeops.l1_loss(prediction, target, mask=target.isfinite())
    """
    ops = ("mul",)

    def operation(self, op, walk):
        counts = walk.scope.metric and not walk.scope.formula
        if len(op.args) != 1 or walk.scope.no_grad or not (walk.stepping or counts):
            return
        left, right = walk.value(op.input), walk.value(op.args[0])
        for x, mask, x_node, mask_node in ((left, right, op.input, op.args[0]), (right, left, op.args[0], op.input)):
            if mask.mask is None or not x.tensor or x.mask or x.constant or x.integer or x.guessed or mask.guessed:
                continue
            if mask.constant and not _ones(mask_node, walk):  # made here, as 1 - eye
                continue
            if finite(x_node, walk, cleaned=True) or _classes(x_node, mask, walk) or _of_pairs(mask_node, mask, walk):
                continue
            if _by_itself(x_node, mask_node, walk):
                continue
            if mask.mask == "likely" and not mask.tensor:
                continue
            fix = None
            if mask.mask == "bool" and not op.inplace and isinstance(op.node, (cst.BinaryOperation, cst.Call)):
                fix = [(op.node, f"safeops.masked_fill({walk.argument(x_node)}, {_inverted(mask_node, walk)}, 0)")]
            walk.report(
                self, op.node, "multiplying by a mask keeps NaN and inf (NaN * 0 is NaN); use safeops.masked_fill", fix
            )
            return


SELECTED = {"masked_fill", "where", "nan_to_num", "index"}  # NaN was replaced already
POLYNOMIAL = set("add sub mul neg pow clamp clamp_min clamp_max minimum maximum relu abs square to float".split())
LABELS = re.compile(r"(^|_)(labels?|one_?hot|ids?|idx|indices|instances?)$", re.IGNORECASE)
WEIGHTS = re.compile(r"(^|_)weights?$", re.IGNORECASE)  # given, or counted: finite
OF_CLASSES = {"cross_entropy", "nll_loss"}  # integers are never NaN
BOUNDED = {
    "sigmoid",
    "softmax",
    "tanh",
    "one_hot",
    "rand",
    "rand_like",
    "hardsigmoid",
    "sign",
    "cosine_similarity",
    "normalize",
}
PRODUCTS = {"matmul", "mm", "bmm", "einsum"}


PAIRS = re.compile(r"(^|_)(pos|positives?|neg|negatives?|same|diag|diagonal|pairs?|anchors?)(_|$)", re.IGNORECASE)


def finite(node, walk, depth=0, *, cleaned=False):
    """No NaN and no inf of its own: a probability, a label, or what is made of these and numbers alone. cleaned: or
    where they were replaced, which may leave large numbers."""
    value = walk.value(node)
    if value.foreign or value.mask or value.constant:
        return True
    name = dotted(node) or ""
    if cleaned and (name in walk.scope.filled or WEIGHTS.search(name) or value.op and value.op.name in SELECTED):
        return True
    op = value.op
    if op is None:
        return bool(LABELS.search(name))
    if op.name in BOUNDED | OF_CLASSES:
        return True
    if op.name == "scatter":  # a one-hot code
        return walk.value(op.input).constant
    if op.name in PRODUCTS:  # of unit vectors
        return all(finite(n, walk, depth + 1, cleaned=cleaned) for n in (op.input, *op.args) if walk.value(n).tensor)
    if op.name in ("stack", "cat"):
        return all(LABELS.search(name) for name in walk.names_in(op.input) - {"self"})
    if depth > 6 or op.name not in POLYNOMIAL | SHAPING | REDUCTIONS:
        return False
    return all(finite(n, walk, depth + 1, cleaned=cleaned) for n in (op.input, *op.args) if walk.value(n).tensor)


def _classes(node, mask, walk):
    """Whether the mask is `x != ignore_index`: then x holds classes, which are finite."""
    test = mask.node if mask.op is None else walk.value(mask.op.input).node
    if not isinstance(test, cst.Comparison):
        return False
    names = walk.names_in(test)
    return dotted(node) in names and any("ignore" in name for name in names)


def _by_itself(node, mask, walk):
    """Whether a branch is chosen by x's own size, `(d < 1) * d**2`: a NaN of x is then in every branch."""
    value = walk.value(mask)
    while value.op is not None:
        parts = [n for n in (value.op.input, *value.op.args) if n is not None and walk.value(n).tensor]
        if len(parts) != 1:
            return False
        value = walk.value(parts[0])
    if not isinstance(value.node, cst.Comparison):
        return False
    names = [{n for n in walk.names_in(part) if walk.scope.get(n).tensor} for part in (node, value.node)]
    op = walk.op(node)
    return bool(names[0]) and names[0] <= names[1] and (op is None or op.name in POLYNOMIAL)


def _ones(node, walk):
    """What stands for a mask that was not given."""
    op = walk.op(node)
    while op is not None and op.name in SHAPING:
        op = walk.op(op.input)
    return op is not None and op.name in ("ones_like", "ones")


def _of_pairs(node, mask, walk):
    """Whether it chooses among pairs of samples, of which none is worse than another: no mask of what is valid."""
    if any(PAIRS.search(name) for name in walk.names_in(node)):  # also of `pos.float()`
        return True
    test = walk.value(mask.op.input).node if mask.op is not None and mask.op.input is not None else mask.node
    if not isinstance(test, cst.Comparison) or len(test.comparisons) != 1:
        return False
    equal = isinstance(test.comparisons[0].operator, (cst.Equal, cst.NotEqual))
    sides = (test.left, test.comparisons[0].comparator)
    return equal and all(walk.value(side).tensor for side in sides)


def _inverted(mask, walk):
    """The source of ~mask."""
    if isinstance(mask, cst.UnaryOperation) and isinstance(mask.operator, cst.BitInvert):
        return walk.argument(mask.expression)
    return f"~{walk.text(mask)}" if _tight(mask) else f"~({walk.text(mask)})"


def _tight(node):
    return bool(getattr(node, "lpar", ())) or isinstance(node, (cst.Name, cst.Call, cst.Attribute, cst.Subscript))


RULES = (TimesMask,)

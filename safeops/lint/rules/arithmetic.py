"""SO2xx, what half cannot hold: squares that overflow, an eps that is 0, fills that do not fit."""

import libcst as cst

from safeops.lint.rule import Rule
from safeops.lint.syntax import number

HALF_TINY = 6e-8  # fp16's smallest subnormal is 2^-24 = 5.96e-8; half of it rounds to 0
HALF_MAX = 65504
DEFAULT_EPS = {"normalize": 1e-12, "cosine_similarity": 1e-8}


def squared(node, walk):
    """x of `x**2`, `x.pow(2)`, `x.square()`, `x * x`, through names; else None."""
    op = walk.op(node)
    if op is None or op.inplace:
        return None
    if op.name == "square" or op.name == "pow" and number(op.arg(0, "exponent")) == 2:
        return op.input
    if op.name == "mul" and len(op.args) == 1 and walk.text(op.input) == walk.text(op.args[0]):
        return op.input
    return None


def tiny(node, walk):
    """A literal that fp16 cannot hold, written here or bound to the name used here; else None."""
    for candidate in (node, walk.value(node).node):
        value = number(candidate) if candidate is not None else None
        if value is not None and 0 < abs(value) < HALF_TINY:
            return value
    return None


def normalized(x, norm, walk):
    """The source of `dim` where `norm` is x's own norm along one dim, kept: x / norm is safeops.normalize(x, dim)."""
    op = walk.op(norm)
    if op is None or op.node is not norm or op.name != "norm" or len(op.args) > 3:
        return None
    if set(op.kwargs) - {"p", "ord", "dim", "keepdim"}:
        return None
    order, dim, keepdim = op.arg(0, "p", "ord"), op.arg(1, "dim"), op.arg(2, "keepdim")
    plain = isinstance(dim, (cst.Integer, cst.Name, cst.UnaryOperation))
    two = order is None or number(order) == 2
    if not (two and plain and keepdim is not None and walk.text(keepdim) == "True"):
        return None
    return walk.text(dim) if walk.argument(x) == walk.argument(op.input) else None


def wide(op, walk):
    return bool(walk.scope.wide or walk.value(op.node).wide)


class SquareSum(Rule):
    code, name = "SO201", "half-square-sum"
    widens = True
    what = "Squares are rounded to half before they are summed: 256^2 is inf in fp16, and below 1.7e-4 a square is 0."
    why = """
    `pow` runs in fp32 only inside CUDA autocast; a `.half()` model, CPU autocast, or a tensor that arrives in half
    squares in half.
    """
    fix = """
    `safeops.mse_loss(a, b)`, `safeops.masked_sum_of_squares(x)`, `safeops.masked_rms(x)`: half is read as it is and
    squared in fp32. Or `.float()` before the square.
    """
    outcome = "the loss is inf in fp16; the true value is 90000"
    rewrites = """
    `((a - b) ** 2).mean()` to `safeops.mse_loss(a, b)`, `(x ** 2).sum(...)` to `safeops.masked_sum_of_squares(x,
    ...)`: fp32 for half input
    """
    bad = """
    def square_loss(prediction, target):
        return ((prediction - target) ** 2).mean()
    """
    good = """
    def square_loss(prediction, target):
        return safeops.mse_loss(prediction, target)
    """
    ops = ("sum", "mean")

    def operation(self, op, walk):
        base = squared(op.input, walk)
        if (
            base is None
            or not walk.computing
            or wide(op, walk)
            or walk.value(op.input).constant
            or "dtype" in op.kwargs
        ):
            return
        walk.report(
            self,
            op.node,
            "squares in half overflow at 256; use a safeops loss or .float() first",
            self._fix(op, base, walk),
        )

    def _fix(self, op, base, walk):
        if walk.op(op.input).node is not op.input or set(op.kwargs) - {"dim", "keepdim"}:
            return None
        if op.name == "sum":
            rest = dims(op, walk)
            if walk.value(base).integer or walk.value(base).mask == "bool":
                return None
            return rest and [(op.node, f"safeops.masked_sum_of_squares({walk.argument(base)}{rest[0]})")]
        difference = base if isinstance(base, cst.BinaryOperation) and isinstance(base.operator, cst.Subtract) else None
        if difference is None or op.args or op.kwargs:
            return None
        sides = [walk.value(n) for n in (difference.left, difference.right)]
        if not all(v.tensor and not v.integer and v.mask != "bool" for v in sides):  # mse_loss takes floating tensors
            return None
        return [(op.node, f"safeops.mse_loss({walk.argument(difference.left)}, {walk.argument(difference.right)})")]


def dims(op, walk):
    """`(", dim=1, keepdim=True",)` of a reduction's arguments; None where there are others."""
    if len(op.args) > 2 or set(op.kwargs) - {"dim", "keepdim"}:
        return None
    given = {**dict(zip(("dim", "keepdim"), op.args)), **op.kwargs}
    return ("".join(f", {name}={walk.text(node)}" for name, node in given.items()),)


class TinyEps(Rule):
    code, name = "SO206", "eps-below-half"
    widens = True
    what = "An eps below 6e-8 is 0 in fp16, and vanishes beside 1 in bf16: the guard is not there when it is needed."
    why = "The smallest number of fp16 is 5.96e-8. `p + 1e-8` is p, `clamp(min=1e-8)` clamps at 0."
    fix = """
    `safeops.safe_log(p, eps=1e-8)`, `safeops.safe_div(a, b, eps=1e-8)`: there eps is a floor that is resolved in
    fp32. Or `.float()` first.
    """
    outcome = "the loss is inf in fp16"
    rewrites = """
    `log(p + eps)`, `log(p.clamp(min=eps))`, `sqrt(p + eps)` and `a / (b + eps)` to `safe_log`, `safe_sqrt` and
    `safe_div` with `eps=`: equal to rounding where p and b are far above eps. `(a + eps) / (b + eps)`, a smoothed
    ratio, gets `fill_value=1`: where both are 0 it stays 1. `a / (a.norm(...) + eps)` becomes `normalize`
    """
    bad = """
    def entropy_loss(p):
        return -torch.log(p + 1e-8).mean()
    """
    good = """
    def entropy_loss(p):
        return -safeops.safe_log(p, eps=1e-8).mean()
    """
    ops = ("add", "sub", "clamp", "clamp_min", "maximum", "max", "log", "sqrt", "div", "normalize", "cosine_similarity")

    def operation(self, op, walk):
        if not (walk.computing or walk.scope.is_module and walk.scope.name == "forward") or wide(op, walk):
            return
        if op.name in ("log", "sqrt", "div"):
            self._outer(op, walk)
            return
        if op.name in DEFAULT_EPS:
            literal = op.arg(2, "eps")
            if literal is None and op.origin != "method":
                self._default(op, walk)
        else:
            literal = op.arg(0, "min", "other")
        eps = tiny(literal, walk) if literal is not None else None
        if eps is None and op.name == "add":
            eps = tiny(op.input, walk)
        if eps is not None and any(walk.value(n).tensor for n in (op.input, *op.args)):
            walk.report(
                self, op.node, f"{eps:g} is 0 in fp16; use a safeops function with eps=, which is resolved in fp32"
            )

    def _default(self, op, walk):
        """F.normalize(x) and F.cosine_similarity(x, y), whose own eps half does not hold."""
        fix = None
        if op.name == "normalize" and len(op.args) < 2 and set(op.kwargs) <= {"dim", "p"}:
            order, dim = op.arg(0, "p"), op.kwargs.get("dim")
            if (order is None or number(order) == 2) and walk.value(op.input).tensor:
                by = "1" if dim is None else walk.text(dim)
                fix = [(op.node, f"safeops.normalize({walk.argument(op.input)}, dim={by})")]
        eps = DEFAULT_EPS[op.name]
        message = f"the default eps, {eps:g}, is 0 in fp16, and a zero vector NaN; use safeops.{op.name}"
        walk.report(self, op.node, message, fix)

    def _outer(self, op, walk):
        """log(p + eps), sqrt(p + eps), a / (b + eps): what was found inside can be rewritten here."""
        inner = (op.args[0] if op.args else None) if op.name == "div" else op.input
        if (
            inner is None
            or not walk.reported("SO206", inner)
            or op.inplace
            or op.kwargs
            or isinstance(op.node, cst.AugAssign)
        ):
            return
        guard = walk.op(inner)
        if (
            guard is None
            or guard.node is not inner
            or guard.name not in ("add", "clamp", "clamp_min")
            or len(guard.args) > 1
        ):
            return
        eps = guard.arg(0, "min", "other")
        if number(eps) is None and not isinstance(eps, cst.Name) or not walk.value(guard.input).tensor:
            return
        if set(guard.kwargs) - {"min"} or (guard.name == "add" and guard.kwargs):
            return
        x, covers = walk.argument(guard.input), [("SO206", inner)]
        if op.name != "div":
            text = f"safeops.safe_{op.name}({x}, eps={walk.text(eps)})"
        elif number(op.input) == 1:
            text = f"safeops.safe_reciprocal({x}, eps={walk.text(eps)})"
        elif not walk.value(op.input).tensor or len(op.args) != 1:
            return
        elif (dim := normalized(op.input, guard.input, walk)) is not None:
            text = f"safeops.normalize({walk.argument(op.input)}, dim={dim}, eps={walk.text(eps)})"
        else:
            text = self._quotient(op.input, x, eps, walk)
            covers += [("SO206", op.input)]
        if text is not None:
            name = text[: text.index("(")]
            message = f"{walk.text(eps)} is 0 in fp16; use {name} with eps=, which is resolved in fp32"
            walk.report(self, op.node, message, [(op.node, text)], covers=covers)

    def _quotient(self, numerator, x, eps, walk):
        """a / (x + eps). In (a + e) / (x + eps) what comes out where a and x are 0 is meant: e / eps."""
        added = walk.op(numerator)
        if added is None or added.name != "add" or len(added.args) != 1 or tiny(added.args[0], walk) is None:
            if added is not None and added.name == "add" and tiny(added.input, walk) is not None:
                return None
            return f"safeops.safe_div({walk.argument(numerator)}, {x}, eps={walk.text(eps)})"
        if added.node is not numerator or added.kwargs or walk.text(added.args[0]) != walk.text(eps):
            return None
        return f"safeops.safe_div({walk.argument(added.input)}, {x}, eps={walk.text(eps)}, fill_value=1)"


class LargeFill(Rule):
    code, name = "SO207", "fill-before-softmax"
    what = """
    `masked_fill(mask, -1e9)` raises in fp16, which ends at 65504; with -inf, a row that is masked out whole is NaN,
    and so is every gradient.
    """
    why = """
    softmax of nothing but -inf is 0 / 0. A sequence of padding alone, or a query that may see no key, is enough.
    """
    fix = """
    `safeops.masked_softmax(scores, ~hidden)`: zeros for such a row. `safeops.masked_fill(scores, hidden, -1e9)`
    saturates to the dtype.
    """
    outcome = "a row that is hidden whole is NaN"
    rewrites = """
    `softmax(x.masked_fill(hidden, -inf), dim)` to `safeops.masked_softmax(x, ~hidden, dim)`, and other fills to
    `safeops.masked_fill`
    """
    bad = """
    def attention(scores: torch.Tensor, hidden: torch.Tensor):
        return F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    """
    good = """
    def attention(scores: torch.Tensor, hidden: torch.Tensor):
        return safeops.masked_softmax(scores, ~hidden, dim=-1)
    """
    ops = ("masked_fill", "softmax", "log_softmax", "mul")

    def operation(self, op, walk):
        if op.name == "masked_fill":
            self._fill(op, walk)
        elif op.name == "mul":
            self._times(op, walk)
        else:
            self._softmax(op, walk)

    def _fill(self, op, walk):
        value = number(op.arg(1, "value")) if op.arg(1, "value") is not None else None
        if value is None or not HALF_MAX < abs(value) < float("inf") or walk.value(op.input).wide or walk.scope.wide:
            return
        fix = None
        mask = op.arg(0, "mask")
        if not op.inplace and len(op.args) + len(op.kwargs) == 2:
            parts = ", ".join(walk.text(n) for n in (op.input, mask, op.arg(1, "value")))
            fix = [(op.node, f"safeops.masked_fill({parts})")]
        walk.report(self, op.node, f"{value:g} does not fit fp16 (it raises there); safeops.masked_fill saturates", fix)

    def _times(self, op, walk):
        """scores + (1 - mask) * -1e9: -inf in fp16, and -inf * 0 is NaN."""
        for factor, other in ((op.input, op.args[0] if op.args else None), (op.args[0] if op.args else None, op.input)):
            value = number(factor) if factor is not None else None
            if (
                value is not None
                and abs(value) > HALF_MAX
                and value < 0
                and walk.value(other).mask
                and not wide(op, walk)
            ):
                walk.report(self, op.node, f"{value:g} is -inf in fp16, and times 0 NaN; use safeops.masked_softmax")

    def _softmax(self, op, walk):
        fill = walk.op(op.input)
        if fill is None or fill.name not in ("masked_fill", "where"):
            return
        values = fill.args[-2:] if fill.name == "where" else [fill.arg(1, "value")]
        if not any(self._infinite(v, walk) for v in values if v is not None) or self._causal(fill, walk):
            return
        fix = None
        inline = fill.name == "masked_fill" and fill.node is op.input and not fill.inplace and not op.inplace
        dim = op.arg(0, "dim")
        if inline and dim is not None and len(op.args) + len(op.kwargs) == 1:
            mask = fill.arg(0, "mask")
            text = walk.text(mask)
            text = text if isinstance(mask, (cst.Name, cst.Call, cst.Attribute, cst.Subscript)) else f"({text})"
            text = f"safeops.masked_{op.name}({walk.text(fill.input)}, ~{text}, dim={walk.text(dim)})"
            fix = [(op.node, text)]
        walk.report(self, op.node, f"a row that is masked out whole is NaN; use safeops.masked_{op.name}", fix)

    def _infinite(self, node, walk):
        """-inf, as a number or as a tensor of it."""
        op = walk.op(node)
        made = [*op.args, op.input] if op is not None and op.name in ("tensor", "full", "full_like", "new_full") else []
        return any(n is not None and number(n) == float("-inf") for n in (node, *made))

    def _causal(self, fill, walk):
        """Under a causal mask every row keeps its own element."""
        mask = fill.input if fill.name == "where" else fill.arg(0, "mask")
        ops = [walk.op(mask)] if mask is not None else []
        for _ in range(3):
            if any(op is not None and op.name in ("tril", "triu") for op in ops):
                return True
            ops = [walk.op(op.input) for op in ops if op is not None and op.input is not None]
        return mask is not None and any("causal" in n or "tri" in n for n in walk.names_in(mask))


RULES = (SquareSum, TinyEps, LargeFill)

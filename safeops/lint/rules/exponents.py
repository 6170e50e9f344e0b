"""How large the argument of an exponential may be: by how it is made, by its name, and by what divides it."""

import re

import libcst as cst

from safeops.lint.rules.bounds import BOUNDED, finite
from safeops.lint.rules.domains import sources
from safeops.lint.rules.squares import tensors, through
from safeops.lint.syntax import dotted
from safeops.lint.tables import SHAPING

# What may be beyond 11 by its name; UNBOUNDED: what is, often enough to be told of outside of a logarithm.
LARGE = re.compile(r"score|logit|pred|output|input|energ|hazard|risk|log_h|(^|[._])[hxyz]\d?$", re.IGNORECASE)
LARGEST = {"max", "amax", "maximum", "logsumexp", "detach"}
NOT_POSITIVE = {"logsigmoid", "log_softmax"}
BOUNDED_ABOVE = NOT_POSITIVE | {"clamp_max", "minimum"}
SCORES = re.compile(r"dice|tversky|jaccard|iou|ssim", re.IGNORECASE)  # between 0 and 1
NOT_NEGATIVE = set("abs square pow norm relu softplus cdist pdist exp sigmoid softmax var std".split())
UNBOUNDED = re.compile(r"(^|[._])(log_?(var|variance|sigma|sigma2|std|rate|scale)s?|logits?|scores?)$", re.IGNORECASE)
TEMPERATURE = re.compile(r"(^|[._])(t|tau|temp\w*|sinkhorn_eps)$", re.IGNORECASE)
COSINE_OVER = 0.1  # exp(1 / 0.1) is 22026: three of them are inf in fp16


def exponentials(node, walk, depth=0):
    """Those in an expression, through names."""
    op = through(node, walk)
    if op is None or depth > 5:
        return
    if op.name in ("exp", "cosh"):
        yield op
    for n in tensors(op, walk):
        yield from exponentials(n, walk, depth + 1)


def may_be_large(formula, walk):
    """Whether what the exponentials in it are of may be large: by its name, or by what divides it. Most similarities
    and distances are small."""
    for op in (found for n in tensors(formula, walk) for found in exponentials(n, walk)):
        if walk.value(op.node).wide:
            continue
        names = walk.names_in(op.input) | sources(op.input, walk)
        over = scaled(op.input, walk) and not kept_small(op.input, walk)
        if op.name == "cosh" or over or any(LARGE.search(name) for name in names):
            return True
    return False


def scaled(node, walk):
    """Whether it is something without a bound by its name, is over a temperature, or is a difference of logarithms."""
    while isinstance(node, cst.UnaryOperation):
        node = node.expression
    inner = through(node, walk)
    if UNBOUNDED.search(dotted(node) or ""):
        return inner is None or inner.name not in BOUNDED
    by = inner.args[0] if inner is not None and inner.args else None
    if inner is None or getattr(walk.op(inner.input), "name", "") == "neg":
        return False
    if inner.name == "div" and not walk.value(by).tensor:
        small = walk.number(by)
        return bool(TEMPERATURE.search(dotted(by) or "")) if small is None else 0 < small <= COSINE_OVER
    if inner.name == "mul":
        scales = (inner.input, by)
        inverse = any(re.search(r"inv\w*_(t|tau|temp\w*)$", dotted(n) or "") for n in scales)
        return inverse or any((walk.number(n) or 0) >= 1 / COSINE_OVER for n in scales)
    names = [walk.names_in(n) - {"self", "torch"} for n in (inner.input, by)] if inner.name == "sub" else []
    return bool(names) and all(any("log" in name for name in side) for side in names)


def kept_small(node, walk):
    """Whether it is by how much a policy has moved since it was sampled, which is little while it is clipped; or the
    logarithm of a variance, which the loss itself pulls to 0."""
    names = walk.names_in(node) | walk.names_in(walk.value(node).node or node)
    return any(re.search(r"(^|_)old(_|$)|ratio|log_?(var|std|scale|sigma)", name) for name in names)


def exponent_range(exp, walk):
    """Why an exponential cannot overflow: its argument is "below" 0, or "safe", less a maximum; None where it may."""
    chosen = isinstance(exp.input, cst.IfExp) and any("max" in name for name in walk.names_in(exp.input))
    if walk.value(exp.input).constant or chosen:
        return "safe"
    if sign_of(exp.input, walk) < 0:
        return "below"
    op, sign = walk.op(exp.input), 1
    while op is not None and (op.name in SHAPING or op.name in ("div", "mul", "neg", "index")):
        inner = op.input
        if op.name == "neg":
            sign = -sign
        elif op.name in ("div", "mul"):
            numbers = [n for n in (op.input, *op.args) if not walk.value(n).tensor]
            sign *= -1 if any(isinstance(n, cst.UnaryOperation) for n in numbers) else 1
            inner = op.args[0] if op.name == "mul" and op.args and numbers == [op.input] else op.input  # -0.5 * x
        op = walk.op(inner)
    if op is None:
        return None
    if op is through(exp.input, walk) and op.name in BOUNDED or op.name == "add" and _maximum(op, walk):
        return "safe"
    if op.name == "sub" and not op.args:  # torch.sub(x, other=y)
        return None
    if op.name == "sub" and not walk.value(op.input).tensor and sign > 0:  # 2 - abs(x)
        return "safe" if sign_of(op.args[0], walk) > 0 else None
    if op.name == "sub" and walk.value(op.args[0]).tensor and sign > 0:
        top = through(op.args[0], walk)
        named = any("max" in name for name in walk.names_in(op.args[0]))
        return "safe" if named or top is not None and top.name in LARGEST else None
    if op.name == "sub" and sign > 0 and (walk.number(op.args[0]) or 0) >= 1:  # (sigmoid(x) - y - 1) / t
        inner = walk.op(op.input)
        sides = (inner.input, *inner.args) if inner is not None and inner.name == "sub" else (op.input,)
        return "below" if any(finite(n, walk) for n in sides) else None
    if op.name == "clamp" and sign > 0 and op.arg(1, "max") is None:
        return None
    return "safe" if op.name == "clamp" or sign > 0 and op.name in BOUNDED_ABOVE else None


def _minus_abs(op, walk):
    """`torch.where(x >= 0, -x, x)`"""
    condition = walk.value(op.input).node
    if not isinstance(condition, cst.Comparison) or len(op.args) != 2:
        return False
    (asked, *_), (minus, x) = condition.comparisons, op.args
    above = isinstance(asked.operator, (cst.GreaterThan, cst.GreaterThanEqual)) and _zero(asked.comparator, walk)
    negative = isinstance(minus, cst.UnaryOperation) and isinstance(minus.operator, cst.Minus)
    return above and negative and walk.text(minus.expression) == walk.text(x) == walk.text(condition.left)


def _zero(node, walk):
    """Whether it is 0, or a tensor of zeros."""
    made = walk.op(node)
    return walk.number(node) == 0 or made is not None and made.name in ("zeros", "zeros_like")


def _maximum(op, walk):
    """`x + max_val`, where max_val is minus the maximum."""
    return any(sign_of(n, walk) < 0 and "max" in (dotted(n) or "") for n in (op.input, *op.args))


def sign_of(node, walk, depth=0):
    """1 of what is not negative, -1 of what is not positive, 0 where there is no telling."""
    value, op = walk.value(node), walk.op(node)
    if op is None:
        number = walk.number(node)
        if number is not None:
            return (number > 0) - (number < 0)
        minus = isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus)
        return -sign_of(node.expression, walk, depth) if minus else int(value.foreign and value.positive)
    if depth > 8 or op.name == "pow" and (walk.number(op.arg(0, "exponent")) or 2) % 2 == 1:
        return 0
    floor = walk.number(op.arg(0, "min")) if op.name in ("clamp", "clamp_min") else None
    if op.name in NOT_NEGATIVE or floor is not None and floor >= 0:
        return 1
    if op.name in NOT_POSITIVE or op.name == "where" and _minus_abs(op, walk):
        return -1
    of = sign_of(op.input, walk, depth + 1)
    if op.name in SHAPING | {"sum", "mean", "cumsum", "index", "float", "double"}:
        return of
    other = sign_of(op.args[0], walk, depth + 1) if op.args else 0
    signs = {"neg": -of, "mul": of * other, "div": of * other}
    signs |= {"add": of * (of == other), "sub": of * (of == -other)}
    return signs.get(op.name, 0)

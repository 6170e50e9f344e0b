"""SO206's guards: an eps, whether half holds it, and whether what it guards needs one."""

import re

from safeops.lint.rules.bounds import PRODUCTS
from safeops.lint.rules.divisions import often_zero
from safeops.lint.rules.domains import BY_CALLER, HALF_STEP, NO_GRAPH, PROBABILITY, sources
from safeops.lint.rules.exponents import exponent_range
from safeops.lint.rules.squares import through
from safeops.lint.syntax import dotted
from safeops.lint.tables import HALVED, RAISED, SHAPING

# What is a probability, too, whatever made it: what softmax made of logits is often called so.
SHARES = re.compile(r"(^|[._])(probs?|logits?|attn|attentions?|densit\w*|hazard\w*|hist(ogram)?)(_|$)")
DATA = re.compile(r"(^|[._])(targets?|labels?|anchors?|gt|y?_?true|truth|boxes)(_|$|\d)")  # fp32, as data are
SELDOM_ZERO = PRODUCTS | {"addmm", "i0e"}
FACTORS = re.compile(r"(^|_)(weight|scale|factor|coeff?|coefficient)s?$", re.IGNORECASE)
HALF_TINY = 6e-8  # fp16's smallest subnormal is 2^-24 = 5.96e-8; half of it rounds to 0


def tiny(node, walk):
    """A literal that fp16 cannot hold, written here or bound to the name used here; else None."""
    value = walk.number(node)
    return value if isinstance(value, (int, float)) and 0 < abs(value) < HALF_TINY else None


def beside_one(node, walk):
    """Whether a number is 1 in fp16 and something else in fp32: `1 + 1e-7`, a decay of 0.9999."""
    value = walk.number(node)
    return isinstance(value, (int, float)) and 0 < abs(value - 1) < HALF_STEP


def needless(op, walk):
    """Whether what it guards is not 0: chosen by `x > 0`, a count, the total of all weights, a sum of exponentials less
    their maximum, a magnitude of the caller's, or what another guard keeps."""
    made = [n for n in (op.input, *op.args) if walk.value(n).tensor]
    return any(
        _chosen(n, walk) or _count(n, walk) or of_weights(n, walk) or _from_one(n, walk) or _kept(n, op, walk)
        for n in made
    )


def guards(node, walk, depth=0):
    """What an expression was made of at last: of `(p + eps) / (q + eps)` both sums."""
    op = through(node, walk)
    if op is None or depth > 3:
        return
    if op.name not in ("div", "mul", "neg"):
        yield op
        return
    for operand in (op.input, *op.args):
        yield from guards(operand, walk, depth + 1)


def matters(op, guard, walk):
    """Whether a logarithm, a root or a power of what was guarded, one over it, or a tensor over its own spread may be
    inf or NaN without the guard. Whether another divisor is ever 0, only the data tell."""
    if op.name in ("div", "addcdiv"):
        one = walk.value(op.input).foreign or walk.number(op.input) is not None
        return of_itself(op, guard, walk) or one and small(guard, walk)
    return small(guard, walk)


def of_itself(op, guard, walk):
    """Whether a tensor is divided by its own deviation or range. (Autocast computes norms in fp32, and rewards have no
    half.)"""
    own = {name for name in sources(op.input, walk) if not NO_GRAPH.search(name)}
    spreads = [n for n in (guard.input, *guard.args) if often_zero(n, walk) and not raised(n, walk)]
    return any(sources(n, walk) & own for n in spreads)


def small(op, walk):
    """Whether the code shows why what is guarded is small: a probability by its name, a difference, a sum, a product.
    Of what else an argument holds, or a product of matrices, only the caller knows; what autocast makes fp32 is only
    half in a model that is cast to half."""
    guarded = [n for n in (op.input, *op.args) if walk.value(n).tensor]
    if any(raised(n, walk) for n in guarded):
        return False
    for node in guarded:
        made = through(node, walk, SHAPING | {"abs", "neg", "sqrt", "mean"})
        if SHARES.search(dotted(node) or "") or dotted(node) in walk.scope.filled:  # with 0
            return True
        names = sources(node, walk)
        if names and all(DATA.search(name) for name in names):
            continue
        named = bool(names) and all(PROBABILITY.search(name) or SHARES.search(name) for name in names)
        if made.name not in SELDOM_ZERO if made is not None else named:
            return True
    return False


def raised(node, walk, depth=0):
    """Whether autocast makes it fp32, so that only a model that is cast to half, as nothing in this file is, has it in
    half: `x**2`, a sum."""
    op = walk.op(node)
    if op is None or depth > 12 or op.name in HALVED or walk.casts_to_half:
        return False
    return op.name in RAISED or any(raised(n, walk, depth + 1) for n in (op.input, *op.args))


def _chosen(node, walk):
    """`x[x > 0]`"""
    op = walk.op(node)
    return op is not None and op.name == "index" and walk.value(node).positive


def _count(node, walk):
    """`mask.sum()` of a mask that nothing here casts: an integer's sum with a number is fp32."""
    op = walk.op(node)
    likely = op is not None and op.name == "sum" and walk.value(op.input).mask == "likely"
    return likely and "to" not in _names(op, walk)


def of_weights(node, walk):
    """Whether it is the total of all weights or factors, which cannot all be 0."""
    total = through(node, walk, SHAPING | {"mul"})
    if total is None or total.name not in ("sum", "mean") or total.args or total.kwargs or walk.value(total.input).mask:
        return False
    return any(FACTORS.search(name) for name in walk.names_in(total.node))


def _from_one(node, walk):
    """A sum of exponentials of what is less than its maximum, a cosh: 1 at least."""
    op = walk.op(node)
    if op is not None and op.name == "cosh":
        return True
    exp = through(op.input, walk) if op is not None and op.name == "sum" else None
    shifted = exp is not None and exp.name == "exp" and getattr(walk.op(exp.input), "name", "") == "sub"
    return shifted and exponent_range(exp, walk) == "safe"


def _names(op, walk):
    """The operations that made something, the last first."""
    while op is not None:
        yield op.name
        op = walk.op(op.input)


def _kept(node, op, walk):
    guard = walk.op(node)
    if op.name in ("clamp", "clamp_min", "maximum", "max") and guard is not None and guard.name == "add":
        return any(walk.value(n).positive and tiny(n, walk) is None for n in (guard.input, *guard.args))
    names = sources(node, walk)
    return bool(names) and all(BY_CALLER.search(name) for name in names)

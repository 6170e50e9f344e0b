"""SO206's own eps of torch's functions: F.normalize(x), F.cosine_similarity(x, y), which half does not hold."""

import re

import libcst as cst

from safeops.lint.layers import biased
from safeops.lint.syntax import dotted, number

DEFAULT_EPS = {"normalize": 1e-12, "cosine_similarity": 1e-8, "cosine_embedding_loss": 1e-12, "poisson_nll_loss": 1e-8}
LEARNED = re.compile(r"(^|[._])(weight|center|centroid|prototype|prox(y|ie)|codebook)s?$")  # drawn at random, at first
ENCODER = re.compile(r"(^|\.)(encode|get)_(image|text|video|audio)(_features)?$")  # of a pretrained model


def given_eps(op):
    return op.kwargs.get("eps") if op.name.endswith("_loss") else op.arg(2, "eps")


def safe_by_default(op, walk):
    """Whether the default is never needed: no row of random numbers is 0; and fp32 that went through a layer stays out
    of half, as a layer in half refuses it, and what autocast makes half autocast normalizes in fp32."""
    if op.origin == "method":
        return True
    if op.name == "poisson_nll_loss":
        return "False" not in walk.text(op.arg(1, "log_input") or op.node.func)
    made = walk.value(op.input).node
    drawn = isinstance(made, cst.Call) and walk.imports.resolve(made.func) == "torch.nn.Parameter"
    given = [walk.value(a.value) for a in getattr(made, "args", ())]
    cast = any(v.wide for v in given) and all(v.wide for v in given if v.tensor)
    return drawn or cast or walk.value(op.input).constant


def default_message(op, walk):
    """(what is wrong, the rewrite or None)"""
    fix = None
    if op.name == "normalize" and len(op.args) < 2 and set(op.kwargs) <= {"dim", "p"}:
        order, dim = op.arg(0, "p"), op.kwargs.get("dim")
        if (order is None or number(order) == 2) and walk.value(op.input).tensor:
            by = "1" if dim is None else walk.text(dim)
            fix = [(op.node, f"safeops.normalize({walk.argument(op.input)}, dim={by})")]
    zero = "log of 0 -inf" if op.name == "poisson_nll_loss" else "a zero vector NaN"
    eps = DEFAULT_EPS[op.name]
    return f"the default eps, {eps:g}, is 0 in fp16, and {zero}; use safeops.{op.name}", fix


def seldom_zero(op, walk):
    """Whether it is a parameter or a whole matrix, came out of a layer with a bias or of a pretrained encoder; or no
    model in half gets here."""
    matrices = op.name == "normalize" and len(getattr(op.arg(1, "dim"), "elements", ())) > 1
    made = walk.value(op.input).node
    by = dotted(made.func) or "" if isinstance(made, cst.Call) else ""
    layer = biased(walk.scope.get(by).node, walk.imports)
    known = LEARNED.search(dotted(op.input) or "") or ENCODER.search(by)
    return bool(matrices or layer or known or walk.half_by_autocast)

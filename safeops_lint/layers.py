"""Modules that are one operation, as `nn.Softmax(1)` is softmax; and numbers that have a name, as of `torch.finfo`."""

import sys

import libcst as cst

from safeops_lint.syntax import Op, dotted

OPERATION = dict(
    pair.split(":")
    for pair in """Softmax:softmax LogSoftmax:log_softmax Sigmoid:sigmoid LogSigmoid:logsigmoid Tanh:tanh ReLU:relu
    Softplus:softplus CosineSimilarity:cosine_similarity CosineEmbeddingLoss:cosine_embedding_loss MSELoss:mse_loss
    PoissonNLLLoss:poisson_nll_loss L1Loss:l1_loss SmoothL1Loss:smooth_l1_loss CrossEntropyLoss:cross_entropy
    NLLLoss:nll_loss""".split()
)
FIRST = dict(Softmax="dim", LogSoftmax="dim", CosineSimilarity="dim", CrossEntropyLoss="weight", NLLLoss="weight")
FINFO = {f"{module}.finfo" for module in ("torch", "numpy")}
SINGLE = dict(eps=2.0**-23, tiny=2.0**-126, smallest_normal=2.0**-126, max=(2 - 2.0**-23) * 2.0**127)
DOUBLE = dict(eps=sys.float_info.epsilon, tiny=sys.float_info.min, max=sys.float_info.max)
DOUBLE["smallest_normal"] = sys.float_info.min
DTYPES = {"": SINGLE, "float32": SINGLE, "float": DOUBLE, "float64": DOUBLE, "double": DOUBLE}  # numpy's float is fp64
FLOAT_INFO = dict(epsilon="eps", min="tiny", max="max")  # sys.float_info's names
FILLED = dict(
    tensor=0, as_tensor=0, scalar_tensor=0, new_tensor=0, full_like=1, full=1, new_full=1
)  # where the value is


def layer_operation(made, call, imports):
    """The Op of `layer(x)`, where `made` is the call that made the layer; None where it is no such layer."""
    name = _class(made, imports)
    if name == "Sequential" and made.args:
        made = made.args[-1].value
        name = _class(made, imports)
    if name not in OPERATION or any(a.star for a in (*call.args, *made.args)) or not call.args:
        return None
    given = {a.keyword.value if a.keyword else FIRST.get(name): a.value for a in made.args}
    args = [a.value for a in call.args if not a.keyword]
    kwargs = {a.keyword.value: a.value for a in call.args if a.keyword}
    given.pop(None, None)
    return args and Op(OPERATION[name], call, args[0], args[1:], {**given, **kwargs}, "functional") or None


def _class(made, imports):
    full = imports.resolve(made.func) if isinstance(made, cst.Call) else None
    prefix, _, name = (full or "").rpartition(".")
    return name if prefix.startswith("torch.nn") else ""


def named_number(node, imports):
    """The value of `torch.finfo(torch.float32).eps`, `np.finfo(float).tiny`, `sys.float_info.epsilon`; else None."""
    if not isinstance(node, cst.Attribute):
        return None
    field, of = node.attr.value, node.value
    if imports.resolve(of) == "sys.float_info" and field in FLOAT_INFO:
        return DOUBLE[FLOAT_INFO[field]]
    if not isinstance(of, cst.Call) or imports.resolve(of.func) not in FINFO or len(of.args) > 1:
        return None
    name = (dotted(of.args[0].value) or "").rpartition(".")[2] if of.args else ""
    known = DTYPES.get(name, {})
    return -known["max"] if known and field == "min" else known.get(field)


def filled_with(call):
    """The expression of the number in `torch.tensor(1e-8)`, `torch.full_like(x, 1e-8)`, `x.new_full(size, 1e-8)`."""
    name = (dotted(call.func) or getattr(getattr(call.func, "attr", None), "value", "")).rpartition(".")[2]
    given = {a.keyword.value: a.value for a in call.args if a.keyword}
    at = FILLED.get(name)
    if at is None or "fill_value" in given:
        return given.get("fill_value") if at is not None else None
    return call.args[at].value if len(call.args) > at and not call.args[at].keyword else None

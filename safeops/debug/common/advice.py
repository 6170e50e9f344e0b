"""Advice: what to write in place of an op that made NaN or inf, or that raised an error."""

import re

from safeops.debug.common.source import traceback_lines
from safeops.debug.common.twins import TWINS

FORWARD = {
    "div": "safeops.safe_div(a, b, eps=...): 0 where b is too small; a floor, as + eps: fill_value=None. Where 0 is a "
    "value like others (a place, a time), mask what has none",
    "reciprocal": "safeops.safe_reciprocal(x, eps=...): 0 where x is too small; fill_value=None: a floor",
    "addcdiv": "weights in float32 under autocast, or eps=1e-4 for the optimizer: Adam's eps=1e-8 is 0 in half (0 / 0)",
    "log": "safeops.safe_log(x, eps=...): log of at least eps, gradient 0 below",
    "log2": "safeops.safe_log(x, eps=...) / math.log(2)",
    "log10": "safeops.safe_log(x, eps=...) / math.log(10)",
    "log1p": "safeops.safe_log(1 + x.float(), eps=...)",
    "sqrt": "safeops.safe_sqrt(x): gradient 0 at 0; for a norm, safeops.safe_norm",
    "rsqrt": "safeops.safe_rsqrt(x, eps=...)",
    "pow": "safeops.safe_pow(x, p); for a sum of squares, safeops.masked_sum_of_squares",
    "exp": "safeops.safe_exp(x), which saturates; for log(sum(exp)), safeops.masked_logsumexp",
    "acos": "safeops.safe_acos(x)",
    "acosh": "safeops.safe_acosh(x)",
    "asin": "safeops.safe_asin(x)",
    "atan2": "safeops.safe_atan2(y, x)",
    "xlogy": "safeops.xlogy(x, y)",
    "sum": "safeops.masked_sum(x): accumulates and returns fp32",
    "mean": "safeops.masked_mean(x): accumulates and returns fp32",
    "var": "safeops.masked_var(x, correction=...): fp32, and empty= says what too few elements give",
    "std": "safeops.masked_std(x, correction=...): fp32, and empty= says what too few elements give",
    "linalg_vector_norm": "safeops.safe_norm(x): no overflow of the squares, gradient 0 at 0",
    "norm": "safeops.safe_norm(x): no overflow of the squares, gradient 0 at 0",
    "_softmax": "safeops.masked_softmax(scores, ~hidden) in place of the fill and the softmax: True = keep",
    "_log_softmax": "safeops.masked_log_softmax(scores, ~hidden) in place of the fill and the softmax: True = keep",
    "logsumexp": "safeops.masked_logsumexp(x, mask)",
    "mse_loss": "safeops.mse_loss(input, target, mask=...)",
    "smooth_l1_loss": "safeops.smooth_l1_loss(input, target, mask=...)",
    "huber_loss": "safeops.huber_loss(input, target, mask=...)",
    "binary_cross_entropy": "safeops.safe_log for the two logarithms, or the version with logits, in fp32",
    "mul": "a mask by multiplication keeps NaN and inf: select instead (safeops.masked_fill, mask= of the losses)",
    "cdist": "safeops.safe_norm(a[:, None] - b[None], dim=-1): gradient 0 at distance 0",
    "index": "select with mask= (safeops.masked_mean, safeops.mse_loss) instead of copying out",
}
# Advice for an op whose backward made NaN or inf. Key: the autograd node's name without "Backward0".
BACKWARD = {
    "Mul": FORWARD["mul"],
    "Where": "apply the function to the kept values alone: safeops.apply_where(condition, args, f1, f2)",
    "LinalgVectorNorm": FORWARD["linalg_vector_norm"],
    "Norm": FORWARD["norm"],
    "Std": FORWARD["std"],
    "Var": FORWARD["var"],
    "Softmax": FORWARD["_softmax"],
    "LogSoftmax": FORWARD["_log_softmax"],
    "EuclideanDist": FORWARD["cdist"],
    "Cdist": FORWARD["cdist"],
    "MseLoss": FORWARD["mse_loss"],
    "SmoothL1Loss": FORWARD["smooth_l1_loss"],
    "HuberLoss": FORWARD["huber_loss"],
    **{
        name.capitalize(): FORWARD[name]
        for name in "div reciprocal log log2 log10 log1p sqrt rsqrt pow exp acos acosh asin atan2".split()
    },
    "Xlogy": FORWARD["xlogy"],
}
# op that makes p: (exact log(p), exact log(1 - p)). A floor, as log(p + eps), would be finite but wrong.
_OF_LOGARITHMS = {
    "sigmoid": ("F.logsigmoid(x)", "F.logsigmoid(-x)"),
    "softmax": ("F.log_softmax(x, dim)", "safeops.log1mexp(F.log_softmax(x, dim, dtype=torch.float64))"),
    "exp": ("x itself", "safeops.log1mexp(x)"),
}
_BETWEEN = frozenset("to copy to_copy clone float clamp clamp_min clamp_max clip".split())
# Key: the function that the user's line calls. The op that failed inside it (a division, a norm) is not in that line.
_FP32 = "fp32 whatever its input's dtype, finite where that is not"
CALLS = {
    "cosine_similarity": "safeops.cosine_similarity(a, b): 0 with gradient 0 where a vector is zero, computed in fp32",
    "normalize": "safeops.normalize(x, dim=...): a zero vector stays zero, its norm is computed in fp32",
    "pairwise_distance": "safeops.safe_norm(a - b, dim=-1): gradient 0 at distance 0",
    **{name: f"safeops.{name}: {_FP32}" for name in (*TWINS, "ctc_loss")},
}
_PROBABILITIES = (
    "safeops.binary_cross_entropy_with_logits on what went into the sigmoid; or input.clamp(0, 1), where a rounding "
    "alone leaves that range"
)
# Key: the safeops function that made NaN or inf itself, because an operand was outside its domain.
OURS = {"binary_cross_entropy": _PROBABILITIES}
OUT_OF_PLACE = (
    "a new tensor: x = x / 3 for x /= 3, x.clamp(...) for x.clamp_(...), x = safeops.masked_fill(x, mask, value) for "
    "x[mask] = value"
)
# (pattern, advice). The pattern is searched in "<user's line>\n<torch's message>".
ERRORS = (
    (
        r"(fill_?\(|\] *=)[^\n]*\nvalue cannot be converted to type .*(Half|BFloat16).* without overflow",
        "safeops.masked_fill(x, mask, value), which saturates to the dtype; before a softmax, safeops.masked_softmax",
    ),
    (
        r"value cannot be converted to type .*(Half|BFloat16).* without overflow",
        "a dtype that holds the number (float32), or in its place the largest that this one holds: "
        "torch.finfo(dtype).max (.min for a negative number)",
    ),
    (r"modified by an inplace operation", OUT_OF_PLACE),
    (
        r"a leaf Variable that requires grad is being used in an in-place",
        "safeops.masked_fill and the like: new tensors",
    ),
    (
        r"binary_cross_entropy.* unsafe to autocast",
        "safeops.binary_cross_entropy, which computes in fp32; or the version with logits",
    ),
    (r"all elements of input should be between 0 and 1", _PROBABILITIES),
    (
        r"Index put requires the source and destination dtypes match|masked_scatter.*same dtype",
        "torch.where(mask, values, x), or safeops.masked_scatter(x, mask, values)",
    ),
    (
        r"device-side assert|index .* is out of (bounds|range)|Target \d+ is out of bounds",
        "ignore_index= or mask= of safeops.cross_entropy; safeops.safe_gather, safe_index_select",
    ),
)
SCALED_LOSS = (
    "keep the loss in fp32 (the losses and reductions of safeops return it): scaled by thousands, a half loss is inf"
)
SCALED = "nothing: GradScaler skips such a step and halves its scale. A smaller init_scale saves the first skips"
STUCK = (
    "the scale did not fall far enough. If it does not in a longer run, the overflow is there at every scale: look at "
    "this op, compute it in float32 (outside autocast), or clip its operands"
)
CAME_IN = "mask it before any arithmetic (mask= of the losses and reductions, safeops.masked_fill), or mend its source"
INVERTED = "the mask may be inverted: True keeps (~mask); or it leaves out too little, or the source is to be mended"
LATE = "safeops.apply_where(mask, args, f1, f2), which gives f1 the kept operands alone; or mask= of the losses"
STALE = "optimizer.zero_grad() before backward: this gradient was left by an earlier one"
OVERFLOW = "safeops.fp32_region around it, which computes in fp32 (safeops losses and reductions do so by themselves)"
RANGE = "scale the operands down before, or subtract their largest: float64 alone holds more"
INFINITE = "the safe_* function for what made the infinite operand: inf - inf and 0 * inf are NaN"
SUMS = "safeops.segment_sum, masked_sum: sums in fp32; or accumulate into a float32 tensor"
_OVERFLOWS = {name: FORWARD[name] for name in "exp pow sum mean var std norm linalg_vector_norm".split()}
_PRODUCTS = frozenset("mul multiply matmul mm bmm addmm linear einsum dot mv square".split())


def advice(op, node):
    """Advice for ATen op `op`, run under autograd node `node` ("LogBackward0") or in the forward pass (None)."""
    name = op.removeprefix("_foreach_").rstrip("_")
    if node:
        stem = node.rpartition("::")[2].partition("Backward")[0]
        for candidate in (stem, stem.lstrip("_")):
            if candidate in BACKWARD:
                return BACKWARD[candidate]
        if stem and stem != "AccumulateGrad":
            return FORWARD.get(stem.lower())
    return FORWARD.get(name)


def of_logarithm(name, makers):
    """Advice for a logarithm whose operand the ops `makers` made, the last first: `log`, ["rsub", "sigmoid"]. None for
    other ops and other makers."""
    less = {"log": "rsub", "log1p": "neg"}.get(name.strip("_"))  # the op on p that makes it log(1 - p)
    chain = [maker for maker in (maker.strip("_") for maker in makers) if maker not in _BETWEEN]
    complement = chain[:1] == [less]
    maker = next(iter(chain[complement:]), None)
    if less is None or maker not in _OF_LOGARITHMS or less == "neg" and not complement:
        return None
    return f"{_OF_LOGARITHMS[maker][complement]}, of the x that went into the {maker}"


def of_overflow(name, in_half):
    """Advice for a call (`exp`, `__mul__`) that made inf from finite operands."""
    name = name.strip("_")
    return CALLS.get(name) or _OVERFLOWS.get(name) or (OVERFLOW if in_half else RANGE)


def of_nan(name):
    """Advice for a call that made NaN from operands without NaN; None if there is none."""
    name = name.strip("_")
    return INFINITE if name in ("add", "sub", *_PRODUCTS) else CALLS.get(name) or FORWARD.get(name)


def of_call(line, facts, or_line=True):
    """Advice for the call in the user's Line that ran the op with these facts; None if there is none.

    The call is the one that the Line marks. If it marks no call and `or_line`, it is the only one in the line that
    CALLS knows."""
    if facts.ours and facts.name[1:] in CALLS:  # a safeops function is not advised in place of itself
        return OURS.get(
            facts.name[1:], "operands inside the domain of this function: nothing else is defined for these"
        )
    marked = re.match(r"[\w.]*?(\w+)\(", line.text[line.begin : line.end])
    names = [marked[1]] if marked else re.findall(r"(\w+)\(", line.text) if or_line else []
    calls = {name for name in names if name in CALLS}
    return CALLS[calls.pop()] if len(calls) == 1 else None


def of_error(error):
    """Advice for an exception, from its message or that of a cause; None if no pattern matches."""
    while error is not None:
        lines = traceback_lines(error.__traceback__)
        for pattern, instead in ERRORS:  # an error without a user's line is judged by its cause
            if lines and re.search(pattern, f"{lines[0].text}\n{error}", re.DOTALL):
                return instead
        error = error.__cause__ or error.__context__
    return None

"""What to write instead: the safeops replacement for the op that made a value that is not finite."""

FORWARD = {
    "div": "safeops.safe_div(a, b, eps=...): 0 where the divisor is too small, gradient 0 there",
    "reciprocal": "safeops.safe_reciprocal(x, eps=...)",
    "log": "safeops.safe_log(x, eps=...): log of at least eps, gradient 0 below",
    "sqrt": "safeops.safe_sqrt(x): gradient 0 at 0; for a norm, safeops.safe_norm",
    "rsqrt": "safeops.safe_rsqrt(x, eps=...)",
    "pow": "safeops.safe_pow(x, p); for a sum of squares, safeops.masked_sum_of_squares",
    "exp": "safeops.safe_exp(x), which saturates; for log(sum(exp)), safeops.masked_logsumexp",
    "acos": "safeops.safe_acos(x)",
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
# By the name of the autograd node, less "Backward0": what the usual op does in its backward.
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
    **{name.capitalize(): FORWARD[name] for name in "div reciprocal log sqrt rsqrt pow exp acos asin atan2".split()},
    "Xlogy": FORWARD["xlogy"],
}
SCALED_LOSS = (
    "keep the loss in fp32 (the losses and reductions of safeops return it): scaled by thousands, a half loss is inf"
)
SCALED = "nothing: GradScaler skips such a step and halves its scale. A smaller init_scale saves the first skips"
CAME_IN = "mask it before any arithmetic (mask= of the losses and reductions, safeops.masked_fill), or mend its source"
STALE = "optimizer.zero_grad() before backward: this gradient was left by an earlier one"
OVERFLOW = "compute this in fp32 (safeops losses and reductions do), or scale the values down before"


def advice(op, node):
    """For ATen op `op`, under autograd node `node` ("LogBackward0") or in the forward pass (None)."""
    name = op.rstrip("_")
    if node:
        stem = node.rpartition("::")[2].partition("Backward")[0]
        for candidate in (stem, stem.lstrip("_")):
            if candidate in BACKWARD:
                return BACKWARD[candidate]
        if stem and stem != "AccumulateGrad":
            return FORWARD.get(stem.lower())
    return FORWARD.get(name)

"""mse_loss: squared error, (input - target)^2."""

from safeops.losses._pointwise import PointwiseLoss, declare_loss


def value(x, y, p0, p1):
    d = x - y
    return d * d


_mse_loss = PointwiseLoss("mse_loss", value)


def mse_loss(input, target, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero"):
    """Squared error: mean of (input - target)^2 over the kept elements.

    Args:
        input: floating tensor, the prediction.
        target: floating tensor of `input`'s shape; one that only broadcasts is taken, with a warning. Differentiable.
        mask: bool tensor, broadcastable to the shape of the loss; True = keep. Masked-out elements do not exist: NaN,
            inf or garbage there changes neither the loss nor a gradient, and their own gradient is exactly 0.
        weight: floating tensor, broadcastable to the shape of the loss; 0 means the same as masked out. Differentiable.
        reduction: "mean" divides the sum by the count of kept elements (by the sum of weights, with weights), "sum",
            or "none".
        denominator: number or 0-dim tensor that the mean divides by instead: with the count over all micro-batches or
            ranks, gradient accumulation and data parallel training are exact.
        empty: value of a mean or sum with nothing kept: "zero" (attached to the graph, zero gradients), "nan", or
            "raise" (ValueError before any work; synchronises to know).

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or of the operands' shape for "none".

    Raises:
        TypeError: an operand is not floating, `mask` is not bool.
        ValueError: shapes do not broadcast, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> input = torch.tensor([300.0, torch.nan], dtype=torch.float16)
        >>> safeops.mse_loss(input, torch.zeros(2), mask=input.isfinite())
        tensor(90000.)
    """
    return _mse_loss.call(input, target, mask, weight, reduction, denominator, empty)


declare_loss(mse_loss)

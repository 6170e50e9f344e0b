"""huber_loss: quadratic below delta, linear above."""

import math

import torch

from safeops import _check
from safeops.losses._pointwise import PointwiseLoss, declare_loss, magnitude


def value(x, y, delta, p1):
    a = magnitude(x - y)
    # select before arithmetic: neither side may overflow in the other's place
    inner, outer = torch.where(a < delta, a, 0), torch.where(a < delta, 0, a)
    return torch.where(a < delta, inner * inner / 2, delta * (outer - delta / 2))


_huber_loss = PointwiseLoss("huber_loss", value)


def huber_loss(input, target, *, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", delta=1.0):
    """Huber loss: d^2 / 2 where d = |input - target| < delta, else delta (d - delta / 2); the mean over kept elements.

    Huber, "Robust Estimation of a Location Parameter", 1964.

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
        delta: where the loss turns from quadratic to linear, finite, greater than 0.

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or of the operands' shape for "none".

    Raises:
        TypeError: an operand is not floating, `mask` is not bool.
        ValueError: shapes do not broadcast, devices differ, unknown `reduction` or `empty`,
            delta is not positive and finite.

    Example:
        >>> safeops.huber_loss(torch.tensor([0.5, 3.0]), torch.zeros(2), delta=2.0, reduction="none")
        tensor([0.1250, 4.0000])
    """
    if type(delta) is not float or not 0.0 < delta < math.inf:
        _check.number("huber_loss", "delta", delta, above=0, finite=True)
    return _huber_loss.call(input, target, mask, weight, reduction, denominator, empty, float(delta))


declare_loss(huber_loss, ", float delta=1.0")

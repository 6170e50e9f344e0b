"""binary_cross_entropy: -(y log p + (1 - y) log(1 - p)) of probabilities p."""

import torch

from safeops.core import check
from safeops.core.definitions import kept
from safeops.core.domain import probability
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import PointwiseLoss


def value(x, y):
    """As in torch, logarithms are at least -100, and the derivative divides by max(x (1 - x), 1e-12).

    Where x (1 - x) < 1e-12, `parabola` replaces the formula: its derivative by x is (x - y) / 1e-12, its derivative by
    y is log(1 - x) - log x."""
    hit, miss = _bounded(torch.log(x)), _bounded(torch.log1p(-x))  # noqa: SO204
    loss = -(y * hit + (1 - y) * miss)
    edge = x * (1 - x) < 1e-12
    inner = torch.where(edge, 0.5, x)
    entropy = -(y * torch.log(inner) + (1 - y) * torch.log1p(-inner))
    parabola = (x - y.detach()).square() / 2e-12 - y * (hit - miss).detach()
    slope = torch.where(edge, parabola, entropy)  # has the loss's derivatives; its value is for inf and NaN
    return torch.where(loss.isfinite(), loss.detach() + (slope - slope.detach()), slope)


def _bounded(log):
    return log.clamp(min=-100)


_binary_cross_entropy = PointwiseLoss(
    "binary_cross_entropy",
    "BCELoss",
    value,
    domain=(probability, probability),
    by_count=True,
    example="torch.tensor([0.5, 0.9]), torch.tensor([1.0, 0.0])",
)


def _refuse_logits(input, mask, weight):
    """For a loss of NaN: raise if a kept finite element is not in [0, 1]. If none is, a kept inf or NaN is the cause,
    and the loss stays NaN."""
    outside = ((input < 0) | (input > 1)) & input.isfinite()
    keep = kept(mask, weight)
    wrong = outside if keep is None else outside & keep
    if wrong.any():
        raise ValueError(
            f"binary_cross_entropy: all elements of input should be between 0 and 1, got "
            f"{input.expand(wrong.shape)[wrong][0].item():.9g}: say torch.sigmoid(input), or of logits "
            "binary_cross_entropy_with_logits(input, target)"
        )


@_binary_cross_entropy.public(operands="")
def binary_cross_entropy(
    input, target, weight=None, *extra, mask=None, reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """Binary cross entropy -(y log p + (1 - y) log(1 - p)) of probabilities; the mean over the kept elements.

    It is computed in fp32, under autocast too, where torch raises on CUDA. For logits use
    `binary_cross_entropy_with_logits`, which is better.

    As in torch, logarithms are at least -100, and the derivative's divisor p (1 - p) is at least 1e-12. So value and
    gradient are finite for a probability of exactly 0 or 1.

    Args:
        input: floating tensor of probabilities p, from 0 to 1. One out of range gives a loss of NaN; on the CPU a mean
            or sum raises ValueError instead (not where the call is compiled).
        target: floating tensor of `input`'s shape, from 0 to 1; broadcast with a warning. Differentiable.
        {arguments}

    Example:
        >>> p = torch.tensor([0.5, 0.0], dtype=torch.float16)
        >>> safeops.binary_cross_entropy(p, torch.tensor([1.0, 0.0]), reduction="none")
        tensor([0.6931, 0.0000])
    """
    if extra or unknown:
        refuse(binary_cross_entropy, extra, unknown)
    loss = _binary_cross_entropy.call(input, target, mask, weight, reduction, denominator, empty)
    if loss.dim() == 0 and check.may_look(loss):
        value = check.read(loss)
        if value != value:
            _refuse_logits(input.detach(), mask, weight)
    return loss

"""gaussian_nll_loss: the negative log likelihood of values with a variance."""

import math

import torch

from safeops.core import check
from safeops.core.domain import any_number, positive
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import Flag, Parameter, TernaryLoss


def value(x, y, var, full, eps):
    d = x - y
    bound = torch.where(var < 0, torch.nan, eps * torch.ones_like(var))
    v = torch.where(var < eps, bound + (var - var.detach()), var)  # max(var, eps), with derivative 1 by var
    loss = (torch.log(v) + d * (d / v)) / 2  # d / v first: d^2 alone may overflow
    return loss + math.log(2 * math.pi) / 2 if full else loss


_gaussian_nll_loss = TernaryLoss(
    "gaussian_nll_loss",
    "GaussianNLLLoss",
    value,
    Flag("full", False, sample=True),
    Parameter("eps", 1e-6, above=0, sample=1e-3),
    domain=(any_number, any_number, positive),
    names=("input", "target", "var"),
    example="torch.tensor([0.5, 3.0]), torch.zeros(2), torch.ones(2)",
)


@_gaussian_nll_loss.public(operands="")
def gaussian_nll_loss(
    input, target, var, full=False, eps=1e-6, reduction="mean", *extra, mask=None, weight=None, denominator=None,
    empty="zero", **unknown,
):  # fmt: skip
    """Negative log likelihood of a normal law: (log v + (x - y)^2 / v) / 2, v = max(var, eps); the mean over the kept.

    Nix and Weigend, "Estimating the Mean and Variance of the Target Probability Distribution", 1994. As in torch,
    `var` gets its gradient below eps too. A negative variance gives NaN, where torch waits for the device and raises.

    Args:
        input: floating tensor, the expected values x.
        target: floating tensor of `input`'s shape, y; broadcast with a warning. Differentiable.
        var: floating tensor, broadcastable with `input`: the variances, not negative. Differentiable. A tensor of shape
            `input.shape[:-1]` is a variance for each row, also where it could broadcast. Or a number.
        full: True adds log(2 pi) / 2.
        eps: the least variance, greater than 0, in the compute dtype.
        {arguments}

    Example:
        >>> x, y, var = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]), torch.tensor([1.0, 4.0])
        >>> safeops.gaussian_nll_loss(x, y, var, reduction="none")
        tensor([0.0000, 1.1931])
    """
    if extra or unknown:
        refuse(gaussian_nll_loss, extra, unknown)
    if isinstance(input, torch.Tensor) and not input.is_nested:
        if check.is_number(var):
            check.number("gaussian_nll_loss", "var", var, minimum=0)
            var = input.new_full((), var, dtype=compute_dtype(input.dtype))
        elif isinstance(var, torch.Tensor) and not var.is_nested and var.dim() and var.shape == input.shape[:-1]:
            var = var.unsqueeze(-1)
    return _gaussian_nll_loss.call(input, target, var, mask, weight, reduction, denominator, empty, full, eps)

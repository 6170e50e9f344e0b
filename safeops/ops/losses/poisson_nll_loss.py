"""poisson_nll_loss: the negative log likelihood of counts."""

import math

import torch

from safeops.core.definitions import product
from safeops.core.domain import any_number, count
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import Flag, Parameter, PointwiseLoss


def value(x, y, log_input, full, eps):
    loss = torch.exp(x) - product(y, x) if log_input else x - product(y, torch.log(x + eps))
    if full:
        n = torch.where(y > 1, y, 1)
        stirling = n * torch.log(n) - n + (math.log(2 * math.pi) + torch.log(n)) / 2
        loss = loss + torch.where(y > 1, stirling, 0)
    return loss


_poisson_nll_loss = PointwiseLoss(
    "poisson_nll_loss",
    "PoissonNLLLoss",
    value,
    Flag("log_input", True),
    Flag("full", False, sample=True),
    Parameter("eps", 1e-8, above=0, sample=0.5),
    domain=(any_number, count),
)


@_poisson_nll_loss.public(operands="")
def poisson_nll_loss(
    input, target, log_input=True, full=False, *extra, mask=None, weight=None, reduction="mean", denominator=None,
    empty="zero", eps=1e-8, **unknown,
):  # fmt: skip
    """Negative log likelihood of counts y by Poisson's law: e^x - y x, or x - y log(x + eps); the mean over the kept.

    Args:
        input: floating tensor: the logarithm of the expected count, or that count.
        target: floating tensor of `input`'s shape: the counts y; broadcast with a warning. Differentiable.
        log_input: True: `input` is the logarithm.
        full: True adds Stirling's y log y - y + log(2 pi y) / 2 for log y!, where y > 1.
        eps: greater than 0; with log_input=False it is added to the expected count, in the compute dtype, so that the
            logarithm of 0 is finite.
        {arguments}

    Example:
        >>> safeops.poisson_nll_loss(torch.tensor([0.0, -torch.inf]), torch.tensor([2.0, 0.0]), reduction="none")
        tensor([1., 0.])
    """
    if extra or unknown:
        refuse(poisson_nll_loss, extra, unknown)
    return _poisson_nll_loss.call(input, target, mask, weight, reduction, denominator, empty, log_input, full, eps)

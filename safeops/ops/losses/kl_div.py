"""kl_div: the Kullback-Leibler divergence, element by element."""

import torch

from safeops.core.definitions import product
from safeops.core.domain import log_probability, probability
from safeops.core.foreign import refuse
from safeops.core.loss_reduction import REDUCTION
from safeops.ops.losses._pointwise import Flag, PointwiseLoss, by_batch


def value(x, y, log_target):
    if log_target:
        same = (x == y) & x.isinf()  # both -inf (probability 0): their difference counts as 0
        return product(torch.exp(y), torch.where(same, 0, y) - torch.where(same, 0, x))
    log = torch.where(y == 0, 0, torch.log(torch.where(y == 0, 1, y)))
    return product(y, log - x)


_kl_div = PointwiseLoss(
    "kl_div",
    "KLDivLoss",
    value,
    Flag("log_target", False),
    domain=(log_probability, probability),
    reductions=(*REDUCTION, "batchmean"),
    example="torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]])",
)


@_kl_div.public(operands="")
def kl_div(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", log_target=False,
    **unknown,
):  # fmt: skip
    """Kullback-Leibler divergence y (log y - x) of log-probabilities x from probabilities y; the mean over the kept.

    Kullback and Leibler, "On Information and Sufficiency", 1951. 0 log 0 is 0, and so is its gradient to `target`.
    reduction="batchmean" is the sum divided by the size of the first dim: the divergence of the distributions.

    Args:
        input: floating tensor of log-probabilities x.
        target: floating tensor of `input`'s shape, probabilities y; broadcast with a warning. Differentiable.
        log_target: True: `target` holds log-probabilities, too.
        {arguments}

    Example:
        >>> q, p = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.75, 0.0]])
        >>> safeops.kl_div(q.log(), p, reduction="batchmean")
        tensor(0.1308)
    """
    if extra or unknown:
        refuse(kl_div, extra, unknown)
    reduction, denominator = by_batch("kl_div", input, reduction, denominator)
    return _kl_div.call(input, target, mask, weight, reduction, denominator, empty, log_target)

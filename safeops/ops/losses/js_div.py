"""js_div: the Jensen-Shannon divergence, element by element."""

import torch

from safeops.core.domain import probability
from safeops.core.dtypes import wide
from safeops.core.foreign import refuse
from safeops.core.loss_reduction import REDUCTION
from safeops.ops.losses._pointwise import PointwiseLoss, by_batch


def value(x, y):
    x, y = (torch.where(p == 0, p.detach(), p) for p in (x, y))
    x, y = wide(x), wide(y)  # the two terms nearly cancel where x is nearly y
    none = x + y == 0
    total = torch.where(none, 1, x + y)
    return (_term(x, y, total) + _term(y, x, total)) / 2


def _term(x, y, total):
    """x log(2 x / (x + y)), and 0 where x is 0."""
    x_, y_ = torch.where(x == 0, 1, x), torch.where(x == 0, 1, y)
    total = torch.where(x == 0, 2, total)
    u = (x_ - y_) / total
    low = u < -0.5  # 1 + u loses digits there
    log = torch.where(low, torch.log(x_ / (total / 2)), torch.log1p(torch.where(low, 0, u)))
    return torch.where(x == 0, x * 0, x_ * log)


_js_div = PointwiseLoss(
    "js_div",
    "JSDivLoss",
    value,
    domain=(probability, probability),
    reductions=(*REDUCTION, "batchmean"),
    example="torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])",
)


@_js_div.public(operands="")
def js_div(input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **unknown):
    """Jensen-Shannon divergence (p log(p / m) + q log(q / m)) / 2, m = (p + q) / 2; the mean over the kept elements.

    Lin, "Divergence Measures Based on the Shannon Entropy", 1991. Symmetric, and at most log 2 for distributions.
    0 log 0 is 0, and so is its gradient. reduction="batchmean" is the sum divided by the size of the first dim.

    Args:
        input: floating tensor of probabilities p.
        target: floating tensor of `input`'s shape, probabilities q; broadcast with a warning. Differentiable.
        {arguments}

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.75, 0.0]])
        >>> safeops.js_div(p, q, reduction="batchmean")
        tensor(0.0338)
    """
    if extra or unknown:
        refuse(js_div, extra, unknown)
    reduction, denominator = by_batch("js_div", input, reduction, denominator)
    return _js_div.call(input, target, mask, weight, reduction, denominator, empty)

"""huber_loss: quadratic below delta, linear above."""

import torch

from safeops.core.definitions import absolute
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import Parameter, PointwiseLoss


def value(x, y, delta):
    d = x - y
    a = absolute(d)
    # Select before arithmetic: the branch that is not taken may overflow. `inner` is d, not |d|: `absolute` has slope 0
    # at d = 0, but the second derivative of d^2 / 2 must be 1 there.
    inner, outer = torch.where(a < delta, d, 0), torch.where(a < delta, 0, a)
    return torch.where(a < delta, inner * inner / 2, delta * (outer - delta / 2))


_huber_loss = PointwiseLoss(
    "huber_loss", "HuberLoss", value, Parameter("delta", 1.0, above=0, sample=1.25), by_count=True
)


@_huber_loss.public()
def huber_loss(
    input, target, reduction="mean", delta=1.0, weight=None, *extra, mask=None, denominator=None, empty="zero",
    **unknown,
):  # fmt: skip
    """Huber loss: d^2 / 2 where d = |input - target| < delta, else delta (d - delta / 2); the mean over kept elements.

    Huber, "Robust Estimation of a Location Parameter", 1964.

    Args:
        delta: where the loss turns from quadratic to linear, greater than 0, at most 3.4e38.
        {arguments}

    Example:
        >>> safeops.huber_loss(torch.tensor([0.5, 3.0]), torch.zeros(2), delta=2.0, reduction="none")
        tensor([0.1250, 4.0000])
    """
    if extra or unknown:
        refuse(huber_loss, extra, unknown)
    return _huber_loss.call(input, target, mask, weight, reduction, denominator, empty, delta)

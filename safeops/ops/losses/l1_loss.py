"""l1_loss: absolute error, |input - target|."""

from safeops.core.definitions import absolute
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import PointwiseLoss


def value(x, y):
    return absolute(x - y)


_l1_loss = PointwiseLoss("l1_loss", "L1Loss", value)


@_l1_loss.public()
def l1_loss(input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **unknown):
    """Absolute error: mean of |input - target| over the kept elements. The derivative at 0 is 0.

    Args:
        {arguments}

    Example:
        >>> safeops.l1_loss(torch.tensor([1.0, 5.0]), torch.tensor([3.0, torch.nan]), mask=torch.tensor([True, False]))
        tensor(2.)
    """
    if extra or unknown:
        refuse(l1_loss, extra, unknown)
    return _l1_loss.call(input, target, mask, weight, reduction, denominator, empty)

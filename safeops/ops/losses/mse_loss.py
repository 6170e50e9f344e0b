"""mse_loss: squared error, (input - target)^2."""

from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import PointwiseLoss


def value(x, y):
    d = x - y
    return d * d


_mse_loss = PointwiseLoss("mse_loss", "MSELoss", value)


@_mse_loss.public()
def mse_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """Squared error: mean of (input - target)^2 over the kept elements.

    Args:
        {arguments}

    Example:
        >>> input = torch.tensor([300.0, torch.nan], dtype=torch.float16)
        >>> safeops.mse_loss(input, torch.zeros(2), mask=input.isfinite())
        tensor(90000.)
    """
    if extra or unknown:
        refuse(mse_loss, extra, unknown)
    return _mse_loss.call(input, target, mask, weight, reduction, denominator, empty)

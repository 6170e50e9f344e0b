"""log_cosh_loss: the logarithm of the hyperbolic cosine of input - target."""

import math

import torch

from safeops.core.definitions import absolute
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import PointwiseLoss


def value(x, y):
    d = x - y
    near = d.abs() < 20  # for larger |d|, e^(-2 |d|) is below rounding: the loss is |d| - log 2
    h = torch.where(near, d, 0) / 2
    s = torch.expm1(h) - torch.expm1(-h)  # 2 sinh(d / 2): torch.sinh on a CPU depends on the number of threads
    return torch.where(near, torch.log1p(s * s / 2), absolute(d) - math.log(2))


_log_cosh_loss = PointwiseLoss("log_cosh_loss", "LogCoshLoss", value)


@_log_cosh_loss.public()
def log_cosh_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """log(cosh(d)) for d = input - target: d^2 / 2 near 0, |d| - log 2 far from it; the mean over the kept elements.

    Saleh and Saleh, "Statistical Properties of the log-cosh Loss Function Used in Machine Learning", 2022.

    Args:
        {arguments}

    Example:
        >>> safeops.log_cosh_loss(torch.tensor([1e-4, 1e4]), torch.zeros(2), reduction="none")
        tensor([5.0000e-09, 9.9993e+03])
    """
    if extra or unknown:
        refuse(log_cosh_loss, extra, unknown)
    return _log_cosh_loss.call(input, target, mask, weight, reduction, denominator, empty)

"""sigmoid_focal_loss: binary cross entropy of logits times a factor that is small where the prediction is right."""

import torch

from safeops.core.definitions import product, sigmoid, softplus
from safeops.core.domain import any_number, probability
from safeops.core.dtypes import LARGEST
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import Parameter, PointwiseLoss


def value(x, y, alpha, gamma):
    bce = product(1 - y, softplus(x)) + product(y, softplus(-x))
    moving = torch.where(x.abs() > 1e3, x.detach(), x)  # e^-1000 is 0 in fp64, too: `missed` is constant there
    missed = y * sigmoid(-moving) + (1 - y) * sigmoid(moving)
    none = missed == 0
    gamma_is_0 = torch.as_tensor(gamma == 0, device=x.device)
    subnormal = (missed > 0) & (missed < torch.finfo(x.dtype).tiny)  # the slope of missed^gamma may be NaN there
    power = torch.where(subnormal | none, 1, missed) ** gamma
    power = torch.where(subnormal, (gamma * torch.where(subnormal, missed, 1).log()).exp(), power)
    power = torch.where(none, gamma_is_0.to(x.dtype), power)
    negative = torch.as_tensor(alpha < 0, device=x.device)
    balance = torch.where(negative, 1, alpha * y + (1 - alpha) * (1 - y))
    return balance * power * bce


_sigmoid_focal_loss = PointwiseLoss(
    "sigmoid_focal_loss",
    "SigmoidFocalLoss",
    value,
    Parameter("alpha", 0.25, minimum=-LARGEST, maximum=1.0),
    Parameter("gamma", 2.0, minimum=0),
    domain=(any_number, probability),
)


@_sigmoid_focal_loss.public(operands="")
def sigmoid_focal_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", alpha=0.25,
    gamma=2.0, **unknown,
):  # fmt: skip
    """Focal loss of logits: a m^gamma bce(x, y), m = y (1 - p) + (1 - y) p, p = sigmoid(x); the mean over the kept.

    a = alpha y + (1 - alpha) (1 - y), or 1 where alpha is negative. Lin et al., "Focal Loss for Dense Object
    Detection", 2017; arguments as in torchvision.ops.

    Args:
        input: floating tensor of logits x.
        target: floating tensor of `input`'s shape, from 0 to 1; broadcast with a warning. Differentiable.
        alpha: the balance of positive and negative targets, at most 1; a negative number means none.
        gamma: the exponent, at least 0: the larger it is, the less a prediction counts that is right already.
        {arguments}

    Example:
        >>> safeops.sigmoid_focal_loss(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 1.0]), reduction="none")
        tensor([4.3322e-02, 1.4679e-06])
    """
    if extra or unknown:
        refuse(sigmoid_focal_loss, extra, unknown)
    return _sigmoid_focal_loss.call(input, target, mask, weight, reduction, denominator, empty, alpha, gamma)

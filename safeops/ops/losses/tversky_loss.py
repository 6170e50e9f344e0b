"""tversky_loss: the Dice loss with separate weights for false positives and false negatives."""

import torch

from safeops.core.foreign import refuse
from safeops.core.symbolic import as_operand
from safeops.ops.losses._region import RegionLoss, quotient


def value(both, input, target, smooth_nr, smooth_dr, alpha, beta, gamma=None):
    # false positives: sum p (1 - t), false negatives: sum (1 - p) t
    total = both + alpha * (input - both) + beta * (target - both)
    loss = 1 - quotient(both + smooth_nr, total + smooth_dr)
    if gamma is None:
        return loss
    perfect = loss <= 0  # below 0 by rounding, a power is NaN; at 0, a power < 1 has slope inf
    return torch.where(perfect, 0, torch.where(perfect, 1, loss) ** as_operand(gamma, loss))


_tversky_loss = RegionLoss("tversky_loss", "TverskyLoss", value, alpha=0.5, beta=0.5, gamma=1.0)


@_tversky_loss.public()
def tversky_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", squared_pred=False,
    smooth_nr=1e-5, smooth_dr=1e-5, ignore_index=None, batch=False, alpha=0.5, beta=0.5, gamma=1.0, **unknown,
):  # fmt: skip
    """Tversky loss: (1 - (both + smooth_nr) / (both + alpha false_positives + beta false_negatives + smooth_dr))^gamma.

    For each class of each image, where both = sum(p t), false_positives = sum(p) - both and false_negatives =
    sum(t) - both over the kept pixels; then the mean over all regions. With alpha = beta = 0.5 it is `dice_loss` with
    twice the smooth terms.

    Salehi et al., "Tversky loss function for image segmentation using 3D fully convolutional deep networks", 2017, with
    the arguments of MONAI's TverskyLoss. The focal form raises each region's loss to a power (Abraham and Khan, "A
    novel focal Tversky loss function", 2018; their gamma is 1 / gamma here).

    Args:
        alpha: weight of the false positives, at least 0.
        beta: weight of the false negatives, at least 0.
        gamma: power of each region's loss, at least 0. A loss of 0 stays 0, with gradient 0. With a power other than 1
            the loss is computed from the sums by a few torch ops on N x C numbers.
        {arguments}

    Example:
        >>> input = torch.tensor([[[0.75, 0.25], [0.25, 0.75]]])
        >>> safeops.tversky_loss(input, torch.tensor([[0, 1]]), alpha=0.25, beta=0.75)
        tensor(0.2500)
    """
    if extra or unknown:
        refuse(tversky_loss, extra, unknown)
    options = squared_pred, smooth_nr, smooth_dr, ignore_index, batch
    parameters = (alpha, beta) if gamma.__class__ is float and gamma == 1 else (alpha, beta, gamma)
    return _tversky_loss.loss(input, target, mask, weight, reduction, denominator, empty, options, *parameters)

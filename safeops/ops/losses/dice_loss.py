"""dice_loss: 1 - 2 sum(p t) / (sum(p) + sum(t)) of each region, with smoothing."""

from safeops.core.foreign import refuse
from safeops.ops.losses._region import RegionLoss, quotient


def value(both, input, target, smooth_nr, smooth_dr):
    return 1 - quotient(2 * both + smooth_nr, input + target + smooth_dr)


_dice_loss = RegionLoss("dice_loss", "DiceLoss", value)


@_dice_loss.public()
def dice_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", squared_pred=False,
    smooth_nr=1e-5, smooth_dr=1e-5, ignore_index=None, batch=False, **unknown,
):  # fmt: skip
    """Dice loss: 1 - (2 sum(p t) + smooth_nr) / (sum(p) + sum(t) + smooth_dr) for each class of each image.

    The sums are over the kept pixels; then the mean over all regions. Milletari et al., "V-Net", 2016, with the
    arguments of MONAI's DiceLoss. (Its `include_background=False` is, of several classes, a `weight` of 0 for class 0.)

    Args:
        {arguments}

    Example:
        >>> input = torch.tensor([[[0.75, 0.25, torch.nan], [0.25, 0.75, torch.nan]]])
        >>> target = torch.tensor([[0, 1, 255]])
        >>> safeops.dice_loss(input, target, ignore_index=255)
        tensor(0.2500)
    """
    if extra or unknown:
        refuse(dice_loss, extra, unknown)
    options = squared_pred, smooth_nr, smooth_dr, ignore_index, batch
    return _dice_loss.loss(input, target, mask, weight, reduction, denominator, empty, options)

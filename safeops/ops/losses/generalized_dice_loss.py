"""generalized_dice_loss: one Dice loss of all classes of an image; small classes count as much as large ones."""

import torch

from safeops.core import loss_reduction
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.symbolic import as_operand
from safeops.ops.losses._region import RegionLoss, quotient

BY_IMAGE = """\
        reduction: "mean" divides the sum over the images by the count of those with a kept pixel, "sum", or "none":
            (N,), or 0-dim with `batch`.
"""


class GeneralizedDice(RegionLoss):
    """The record of generalized_dice_loss: a loss per image, from the sums of N x C regions, in torch ops in fp64."""

    reduction_text = BY_IMAGE

    def loss(self, input, target, mask, weight, reduction, denominator, empty, options):
        _, *smooth, _, batch = options
        sums = self.checked_sums(input, target, mask, weight, reduction, denominator, empty, options)
        smooth_nr, smooth_dr = (as_operand(x, sums) for x in smooth)
        sums = sums.sum(1) if batch else sums
        both, input_sum, target_sum = sums[:3].unbind()  # (without the count, which has no gradient)
        exists = sums[3].detach() > 0
        if weight is not None:
            exists = exists & (weight != 0)
        w = class_weights(target_sum, exists)
        if weight is not None:
            w = w * torch.where(exists, weight.double(), 0)  # (autograd adds weight's gradient in fp64)
        value = quotient(2 * (w * both).sum(-1) + smooth_nr, (w * (input_sum + target_sum)).sum(-1) + smooth_dr)
        keep = exists.any(-1)
        if empty == "raise":
            self._raise_if_empty(input, keep, None, reduction, denominator)
        value = torch.where(keep, 1 - value, float("nan") if empty == "nan" and reduction == "none" else 0.0)
        empty = "zero" if empty == "raise" else empty
        value = loss_reduction.reduce(self.name, value, keep, None, reduction, denominator, empty)
        return value.to(compute_dtype(input.dtype, target.dtype))


def class_weights(size, exists):
    """1 / size^2 of each class. A class without a pixel gets the largest weight of its image, 0 if no class has one."""
    square = size * size
    present = exists & ~(square < torch.finfo(square.dtype).tiny)  # NaN counts as present, and so shows
    w = torch.where(present, 1 / torch.where(present, square, 1), 0)
    return torch.where(exists & ~present, w.amax(-1, keepdim=True), w) if size.shape[-1] else w


_generalized_dice_loss = GeneralizedDice("generalized_dice_loss", "GeneralizedDiceLoss", None)


@_generalized_dice_loss.public()
def generalized_dice_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", squared_pred=False,
    smooth_nr=1e-5, smooth_dr=1e-5, ignore_index=None, batch=False, **unknown,
):  # fmt: skip
    """Generalised Dice loss: 1 - (2 sum_c w sum(p t) + smooth_nr) / (sum_c w (sum(p) + sum(t)) + smooth_dr).

    w = 1 / sum(t)^2. The inner sums are over the kept pixels of class c of an image; then the mean over the images.

    Sudre et al., "Generalised Dice overlap as a deep learning loss function for highly unbalanced segmentations", 2017,
    with the arguments of MONAI's GeneralizedDiceLoss and `weight`, which multiplies the w of each class. As in MONAI, a
    class without a pixel has the largest w of the other classes, and an image without any target pixel has the loss of
    the smoothing alone.

    w is computed in fp64, where neither the sums nor 1 / sum(t)^2 overflow. A class of 1000 pixels has w = 1e-6: for
    large images the smoothing dominates the quotient. smooth_nr=0, smooth_dr=0 are safe.

    Args:
        {arguments}

    Example:
        >>> input = torch.tensor([[[0.75, 0.25, torch.nan], [0.25, 0.75, torch.nan]]])
        >>> target = torch.tensor([[0, 1, 255]])
        >>> safeops.generalized_dice_loss(input, target, ignore_index=255)
        tensor(0.2500)
    """
    if extra or unknown:
        refuse(generalized_dice_loss, extra, unknown)
    options = squared_pred, smooth_nr, smooth_dr, ignore_index, batch
    return _generalized_dice_loss.loss(input, target, mask, weight, reduction, denominator, empty, options)

"""The same loss written seven times: five usual ways, the hand-made repair, and safeops.

Every function gets what the training loop gives it, inside autocast: `disparity` (1, 1, H, W), the network's output,
in fp16; and `truth` (1, 1, H, W) in fp32, inf where it was not measured. Each returns error in disparity (pixels)
plus error in depth (metres), averaged over the measured pixels. None of the five is sabotaged: each is the pattern of
many published training scripts, and each repairs what broke the one before.
"""

import torch
import torch.nn.functional as F

import safeops
from safeops.demo.data import FOCAL_BASELINE


def boolean_write(disparity, truth):
    """Write 0 over the unmeasured pixels of both, so that they cost nothing."""
    unknown = truth.isinf()
    disparity[unknown] = 0
    truth[unknown] = 0  # and the data set has changed with it
    depth = FOCAL_BASELINE / (disparity + 1e-8)
    return F.smooth_l1_loss(disparity, truth) + F.smooth_l1_loss(depth, FOCAL_BASELINE / (truth + 1e-8))


def multiply_by_mask(disparity, truth):
    """Multiply the unmeasured pixels' error by 0."""
    mask = truth.isfinite()
    depth = FOCAL_BASELINE / (disparity + 1e-8)
    error = F.smooth_l1_loss(disparity, truth, reduction="none") * mask
    depth_error = F.smooth_l1_loss(depth, FOCAL_BASELINE / truth, reduction="none") * mask
    return (error + depth_error).sum() / mask.sum()


def boolean_index(disparity, truth):
    """Index the measured pixels out; guard the division with + 1e-8."""
    mask = truth.isfinite()
    disparity, truth = disparity[mask], truth[mask]
    depth = FOCAL_BASELINE / (disparity + 1e-8)
    return F.smooth_l1_loss(disparity, truth) + F.smooth_l1_loss(depth, FOCAL_BASELINE / truth)


def where_after_division(disparity, truth):
    """Replace the depths that went wrong, after the division."""
    mask = truth.isfinite()
    disparity, truth = disparity[mask], truth[mask]
    depth = torch.where(disparity > 1, FOCAL_BASELINE / disparity, 0)
    return F.smooth_l1_loss(disparity, truth) + F.smooth_l1_loss(depth, FOCAL_BASELINE / truth)


def half_mask(disparity, truth):
    """Replace the bad values before the arithmetic; mask in the network's dtype, sum, divide by the count."""
    mask = truth.isfinite()
    truth = torch.where(mask, truth, 1)
    mask = mask.type_as(disparity)
    depth = FOCAL_BASELINE / disparity.clamp(min=1)
    error = F.smooth_l1_loss(disparity, truth, reduction="none")
    depth_error = F.smooth_l1_loss(depth, FOCAL_BASELINE / truth, reduction="none")
    return ((error + depth_error) * mask).sum() / mask.sum()


def repaired_by_hand(disparity, truth):
    """All of it repaired: upcast first, index, clamp before dividing, let torch count."""
    mask = truth.isfinite()
    disparity, truth = disparity.float()[mask], truth[mask]
    depth = FOCAL_BASELINE / disparity.clamp(min=1)
    return F.smooth_l1_loss(disparity, truth) + F.smooth_l1_loss(depth, FOCAL_BASELINE / truth)


def with_safeops(disparity, truth):
    """The half prediction, the inf target and the mask, as they are."""
    mask = truth.isfinite()
    depth = safeops.safe_div(truth.new_tensor(FOCAL_BASELINE), disparity, eps=1)
    return safeops.smooth_l1_loss(disparity, truth, mask=mask) + safeops.smooth_l1_loss(
        depth, FOCAL_BASELINE / truth, mask=mask
    )

"""One loss written seven times: five usual ways, the hand-made repair, and safeops.

The training loop calls every function inside autocast, with the network's output `disparity` (1, 1, H, W) in fp16, at
least 0, and `truth` (1, 1, H, W) in fp32, 0 where it was not measured. Each returns, over the measured pixels, the
error in pixels plus ten times the scale-invariant error of Eigen, Puhrsch and Fergus (2014): with
g = log(truth / disparity), the logarithm of predicted over true depth,

    mean(smooth_l1(disparity - truth)) + 10 (mean(g^2) - mean(g)^2 / 2)

None of the five is sabotaged: each is a pattern of many published training scripts, and each repairs the error of the
one before. They fail because of the truth's zeros and its number of pixels, whatever the network outputs.
"""

import torch
import torch.nn.functional as F

import safeops


def boolean_write(disparity, truth):
    """Write 0 over the unmeasured pixels of the prediction too, so that they cost nothing."""
    unknown = truth == 0
    disparity[unknown] = 0
    known = (~unknown).sum()
    g = torch.log(truth.clamp(min=1)) - torch.log(disparity.clamp(min=1))
    error = F.smooth_l1_loss(disparity, truth, reduction="sum") / known
    return error + 10 * ((g**2).sum() / known - 0.5 * (g.sum() / known) ** 2)


def multiply_by_mask(disparity, truth):
    """Multiply the unmeasured pixels by 0: log(0) is -inf there, and -inf times 0 is NaN."""
    mask = (truth > 0).float()
    g = (torch.log(truth) - torch.log(disparity.clamp(min=1))) * mask
    error = (F.smooth_l1_loss(disparity, truth, reduction="none") * mask).sum() / mask.sum()
    return error + 10 * ((g**2).sum() / mask.sum() - 0.5 * (g.sum() / mask.sum()) ** 2)


def half_eps(disparity, truth):
    """Add 1e-8 inside the logarithm: right in fp32, but the truth is cast to the network's dtype, where 1e-8 is 0."""
    truth = truth.type_as(disparity)
    mask = (truth > 0).float()
    g = (torch.log(truth + 1e-8) - torch.log(disparity.clamp(min=1))) * mask
    error = (F.smooth_l1_loss(disparity, truth, reduction="none") * mask).sum() / mask.sum()
    return error + 10 * ((g**2).sum() / mask.sum() - 0.5 * (g.sum() / mask.sum()) ** 2)


def where_after_log(disparity, truth):
    """Replace infinite values after the logarithm: the gradient there is 0 times an infinite slope, NaN."""
    mask = truth > 0
    g = torch.where(mask, torch.log(truth / disparity.clamp(min=1)), 0)
    error = torch.where(mask, F.smooth_l1_loss(disparity, truth, reduction="none"), 0).sum() / mask.sum()
    return error + 10 * ((g**2).sum() / mask.sum() - 0.5 * (g.sum() / mask.sum()) ** 2)


def half_mask(disparity, truth):
    """Replace before the arithmetic; mask in the network's dtype, and divide by its sum: inf beyond 65504 pixels.

    The loss is computed outside autocast, as in scripts whose autocast ends with the network: inside it, CUDA would sum
    in fp32.
    """
    with torch.autocast(disparity.device.type, enabled=False):
        known = truth > 0
        mask = known.type_as(disparity)
        disparity, truth = disparity.float(), torch.where(known, truth, 1)
        g = (torch.log(truth) - torch.log(disparity.clamp(min=1))) * mask
        error = (F.smooth_l1_loss(disparity, truth, reduction="none") * mask).sum() / mask.sum()
        return error + 10 * ((g**2).sum() / mask.sum() - 0.5 * (g.sum() / mask.sum()) ** 2)


def repaired_by_hand(disparity, truth):
    """All of it repaired: upcast first, index, clamp before the logarithm, let torch count."""
    mask = truth > 0
    disparity, truth = disparity.float()[mask], truth[mask]
    g = torch.log(truth) - torch.log(disparity.clamp(min=1))
    return F.smooth_l1_loss(disparity, truth) + 10 * ((g**2).mean() - 0.5 * g.mean() ** 2)


def with_safeops(disparity, truth):
    """Pass the half prediction, the truth with its zeros and the mask as they are. mean(g^2) = var(g) + mean(g)^2."""
    mask = truth > 0
    g = safeops.safe_log(truth) - safeops.safe_log(disparity, eps=1)
    silog = safeops.masked_var(g, mask, correction=0) + 0.5 * safeops.masked_mean(g, mask) ** 2
    return safeops.smooth_l1_loss(disparity, truth, mask=mask) + 10 * silog


VERDICTS = {  # how each run ends, on every device, in the words of `screen.verdict`
    boolean_write: "raises at step 1",
    multiply_by_mask: "loss is nan from step 1",
    half_eps: "loss is nan from step 1",
    where_after_log: "gradients not finite",
    half_mask: "loss is 0, silently",
    repaired_by_hand: "learns",
    with_safeops: "learns",
}
USUAL, COMPLETE = list(VERDICTS)[:5], list(VERDICTS)[5:]

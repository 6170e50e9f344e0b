"""smooth_l1_loss: quadratic below beta, linear above."""

import torch

from safeops.core.definitions import absolute
from safeops.core.dtypes import filled
from safeops.core.foreign import refuse
from safeops.ops.losses._pointwise import Parameter, PointwiseLoss


def value(x, y, beta):
    d = x - y
    a = absolute(d)
    if not isinstance(beta, torch.Tensor) and beta < torch.finfo(a.dtype).tiny:
        return a
    # Select before arithmetic: the branch that is not taken may overflow. `inner` is d, not |d|: `absolute` has slope 0
    # at d = 0, but the second derivative of d^2 / (2 beta) must be 1 / beta there.
    inner, outer = torch.where(a < beta, d, 0), torch.where(a < beta, 0, a)
    # scale, a power of two near 1 / sqrt(beta), keeps inner^2 and the gradient g inner / beta in the dtype's range.
    beta_ = filled(a, (), beta)
    root = beta_.sqrt()
    scale = torch.frexp(root)[0] / root
    inner, beta_ = inner * scale, beta_ * scale * scale
    return torch.where(a < beta, inner * inner / (2 * beta_), outer - beta / 2)


_smooth_l1_loss = PointwiseLoss("smooth_l1_loss", "SmoothL1Loss", value, Parameter("beta", 1.0, minimum=0, sample=0.75))


@_smooth_l1_loss.public()
def smooth_l1_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", beta=1.0,
    **unknown,
):  # fmt: skip
    """Smooth L1: d^2 / (2 beta) where d = |input - target| < beta, else d - beta / 2; the mean over the kept elements.

    beta = 0 is `l1_loss`, with derivative 0 at 0. Girshick, "Fast R-CNN", 2015, with torch's `beta`.

    Args:
        beta: where the loss turns from quadratic to linear, from 0 to 3.4e38. A subnormal one (below 1.2e-38 in
            fp32) counts as 0.
        {arguments}

    Example:
        >>> safeops.smooth_l1_loss(torch.tensor([0.5, 3.0]), torch.zeros(2), reduction="none")
        tensor([0.1250, 2.5000])
    """
    if extra or unknown:
        refuse(smooth_l1_loss, extra, unknown)
    return _smooth_l1_loss.call(input, target, mask, weight, reduction, denominator, empty, beta)

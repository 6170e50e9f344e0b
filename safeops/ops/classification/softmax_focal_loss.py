"""softmax_focal_loss: cross entropy times a factor that is small where the row's class is predicted already."""

import torch

from safeops.core.foreign import refuse
from safeops.core.symbolic import as_operand
from safeops.ops.classification._nll_function import NLLFunction
from safeops.ops.losses._pointwise import Parameter

CERTAIN = 128.0  # beyond this nll, 1 - e^-nll is 1, in fp64 too


def value(nll, gamma):
    """(1 - p)^gamma nll with p = e^-nll. 1 - p = -expm1(-nll) loses no digits of nll.

    The factor (1 - p)^gamma clamps nll, so that its slope beyond the bounds is 0: with gamma < 1 the slope at nll = 0
    would be infinite, and the gradient of an infinite nll would be inf * 0.
    """
    missed = -torch.expm1(-nll.clamp(torch.finfo(nll.dtype).tiny, CERTAIN))
    return nll * missed ** as_operand(gamma, nll)


_softmax_focal_loss = NLLFunction("softmax_focal_loss", "SoftmaxFocalLoss", value, Parameter("gamma", 2.0, minimum=0))


@_softmax_focal_loss.public()
def softmax_focal_loss(
    input, target, weight=None, *extra, gamma=2.0, mask=None, reduction="mean", ignore_index=-100, row_weight=None,
    denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """w_y (1 - p_y)^gamma (-log p_y) of each row, p = softmax(input), y its class; the mean over the kept rows.

    The focal loss of several classes: Lin et al., "Focal Loss for Dense Object Detection", 2017, with class weights w
    for its alpha. gamma = 0 gives `cross_entropy`, whose kernels compute -log p_y from one read of the logits in each
    direction.

    1 - p_y = -expm1(log p_y) loses no digits. (log p_y itself is a difference of logits: in fp32 its error is 1e-7 of
    them, and a loss below that is 0.) A mean with class weights divides by their sum, as in `cross_entropy`; to divide
    by the count, pass it as `denominator`.

    Args:
        gamma: the exponent, at least 0: the larger it is, the less a row counts that is right already.
        {arguments}

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [3.0, 0.0], [torch.nan, 0.0]])
        >>> safeops.softmax_focal_loss(logits, torch.tensor([0, 0, -100]), reduction="none")
        tensor([1.7329e-01, 1.0928e-04, 0.0000e+00])
    """
    if extra or unknown:
        refuse(softmax_focal_loss, extra, unknown)
    return _softmax_focal_loss.call(
        input, target, weight, mask, reduction, ignore_index, row_weight, denominator, empty, gamma
    )

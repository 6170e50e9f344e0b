"""softmax_focal_loss: cross entropy, less where the row's class is predicted already."""

import copy

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.dtypes import LARGEST, compute_dtype
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.core.symbolic import as_operand
from safeops.ops.classification._classification import (
    ARGUMENTS,
    class_dim,
    rows_of,
    validate_index,
    validate_reduction,
    validate_weight,
    weighed,
    without_weight_0,
)
from safeops.ops.classification.cross_entropy import _cross_entropy
from safeops.ops.classification.nll_loss import _nll_loss

NAME = "softmax_focal_loss"
CERTAIN = 128.0  # beyond, 1 - e^-nll is 1 in fp64 too

# ---- definition


def focal(nll, gamma):
    """(1 - p)^gamma nll, p = e^-nll, with all digits of nll: 1 - p does not cancel.

    The bounds have slope 0: gamma < 1 makes no infinite slope at nll = 0, nor an infinite loss one of inf * 0.
    """
    missed = -torch.expm1(-nll.clamp(torch.finfo(nll.dtype).tiny, CERTAIN))
    return nll * missed ** as_operand(gamma, nll)


# ---- record


def _validate_gamma(name, gamma):
    check.number(name, "gamma", gamma, minimum=0, maximum=LARGEST)


def _validate_options(name, reduction, empty, gamma, ignore_index):
    loss_reduction.validate_options(name, reduction, empty)
    _validate_gamma(name, gamma)
    validate_index(name, ignore_index)


_softmax_focal_loss = Composed(
    NAME,
    _cross_entropy,
    *sums.ALL,
    module="SoftmaxFocalLoss",
    buffers=("weight",),
    example="torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 1])",
    validate_options=_validate_options,
)
_softmax_focal_loss.validate_buffer = lambda name, key, x: validate_weight(name, x)
_operands = copy.copy(_nll_loss)  # the same are right: class indices alone
_operands.name = NAME

# ---- public function


@_softmax_focal_loss.public(
    "(Tensor input, Tensor target, Tensor? weight=None, *, float gamma=2.0, Tensor? mask=None, "
    'str reduction="mean", int ignore_index=-100, Tensor? row_weight=None, Tensor? denominator=None, '
    'str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def softmax_focal_loss(
    input, target, weight=None, *extra, gamma=2.0, mask=None, reduction="mean", ignore_index=-100, row_weight=None,
    denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """w_y (1 - p_y)^gamma (-log p_y) of each row, p = softmax(input), y its class; the mean over the kept rows.

    The focal loss of several classes: Lin et al., "Focal Loss for Dense Object Detection", 2017, with class weights w
    for its alpha. Gamma 0 is `cross_entropy`, whose kernels read the logits once in each direction: the factor follows
    from the row's -log p_y alone, of which 1 - p_y = -expm1(log p_y) loses no digit. (log p_y itself is a difference of
    logits: in fp32 its error is 1e-7 of them, and a loss below that is 0.)
    A mean with class weights divides by their sum, as `cross_entropy`; for the count, pass it as `denominator`.

    Args:
        input: (N, C), (C,) or (N, C, d1, ...) floating tensor of logits; a class of -inf does not exist.
        target: class indices in [0, C), int64, int32 or uint8, of shape (N,), () or (N, d1, ...).
        gamma: how much less counts what is right already, at least 0.
        row_weight: floating tensor, broadcastable to the rows' shape: a factor of each row's loss, and the mean divides
            by the sum of them (times the class weights). A row of weight 0 is masked out. Differentiable.
        {arguments}

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [3.0, 0.0], [torch.nan, 0.0]])
        >>> safeops.softmax_focal_loss(logits, torch.tensor([0, 0, -100]), reduction="none")
        tensor([1.7329e-01, 1.0928e-04, 0.0000e+00])
    """
    if extra or unknown:
        refuse(softmax_focal_loss, extra, unknown)
    validate_reduction(NAME, input, reduction, denominator, empty)
    _validate_gamma(NAME, gamma)
    _operands.validate(input, target, weight, mask, ignore_index)
    if row_weight is not None:
        mask = without_weight_0(NAME, row_weight, mask, input)
    weights = None
    if weight is not None:
        compute = compute_dtype(input.dtype, weight.dtype)
        _, mask, weights = rows_of(input.shape[class_dim(input)], target, weight, mask, ignore_index, compute)
    nll, keep, _ = _cross_entropy.call(input, target, None, mask, ignore_index, 0.0, 0.0, 1.0, None)
    loss = products = focal(nll, gamma)
    if weights is not None:
        products = loss * weights
    if row_weight is not None:
        products, weights = weighed(products, keep, weights, row_weight)
    return loss_reduction.reduce(NAME, products, keep, weights, reduction, denominator, empty).to(loss.dtype)

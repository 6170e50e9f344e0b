"""silog_loss: the scale-invariant error of logarithms, a loss for depth networks.

Two ops: `log_ratio` reads both depths and the mask and writes g = log input - log target; `error` reads g and the mask.
Backward runs their backward ops in reverse order, and writes and reads the gradient of g in between.
"""

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.definitions import kept
from safeops.core.domain import positive
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.core.symbolic import as_operand, symbolic
from safeops.ops.losses._pointwise import PointwiseLoss
from safeops.ops.reductions._statistic import reciprocal, root
from safeops.ops.reductions.masked_var import Spread, deviations

NAME = "silog_loss"


def validate_options(name, reduction, empty, variance_focus, batch, eps):
    loss_reduction.validate_options(name, reduction, empty)
    check.number(name, "variance_focus", variance_focus, minimum=0, maximum=1)
    check.boolean_flag(name, "batch", batch)
    check.number(name, "eps", eps, minimum=0)


def validate(input, target, mask, weight, reduction, denominator, batch):
    check.floating(NAME, "input", input, numbers=True)
    check.floating(NAME, "target", target, numbers=True)
    if input.shape != target.shape:
        raise ValueError(
            f"{NAME}: target {check.shown(target)} must have the shape of input {check.shown(input)}; where an image "
            "has a channel's dim in one alone, squeeze it"
        )
    if not batch and input.dim() < 2:
        raise ValueError(f"{NAME}: input must be (N, d1, ...) with batch=False, got shape {check.shown(input)}")
    check.mask(NAME, mask, "input", input, input.shape)
    check.weight(NAME, weight, "input", input, input.shape)
    loss_reduction.validate_denominator(NAME, reduction, denominator)
    check.same_device(NAME, "input", input, target=target, mask=mask, weight=weight, denominator=denominator)


def log_ratio(x, y):
    return torch.log(x) - torch.log(y)


def error(k, variance_focus):
    """Returns (value, origin, scale, exists): value = sqrt(variance + (1 - variance_focus) mean^2), and its derivative
    w (g - variance_focus mean) / (value sum w) = w (g - origin) scale."""
    binade = k.binade()
    squares, mean, total, exists = deviations(k, k.x / binade, 0, binade)
    value = binade * root(squares / total + (1 - variance_focus) * (mean * mean))
    return value, variance_focus * (binade * mean), reciprocal(value * total), exists


# Both records have the loss's name, so that errors name the loss; `_silog_loss`, created last, stays in the registry.
_log_ratio = PointwiseLoss(NAME, None, log_ratio, domain=(positive, positive), kernel="log_ratio")
_error = Spread(NAME, error, file="masked_var")
_silog_loss = Composed(
    NAME,
    _log_ratio,
    _error,
    *sums.ALL,
    module="SILogLoss",
    example="torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 2.0]])",
    validate_options=validate_options,
)


@_silog_loss.public(
    '(Tensor input, Tensor target, *, Tensor? mask=None, Tensor? weight=None, str reduction="mean", '
    'Tensor? denominator=None, str empty="zero", float variance_focus=0.85, bool batch=True, float eps=0.0) -> Tensor'
)
def silog_loss(
    input, target, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero",
    variance_focus=0.85, batch=True, eps=0.0, **unknown,
):  # fmt: skip
    """Scale-invariant error: sqrt(mean(g^2) - variance_focus mean(g)^2), g = log input - log target, over the pixels.

    Eigen et al., "Depth Map Prediction from a Single Image using a Multi-Scale Deep Network", 2014; the root and 0.85
    are from Lee et al., "From Big to Small" (BTS), 2019, who multiply the loss by 10.

    The root is of var(g) + (1 - variance_focus) mean(g)^2, where nothing cancels. Only g itself does: its error is up
    to 1e-7 of the logarithms, which shows in the gradient of an almost perfect prediction. A perfect prediction has
    loss 0 and gradient 0, where the formula above has the gradient NaN.

    A pixel exists if its depth has been measured: a target of 0, below 0, inf or NaN is not a measurement. A kept NaN
    of `input` gives NaN. A depth that is predicted as 0 or less has no logarithm, and gives inf or NaN: `eps` is for a
    network that can predict 0.

    Args:
        input: floating tensor of depths, greater than 0, of any shape.
        target: floating tensor of `input`'s shape, the depths measured. Differentiable.
        mask: bool tensor, broadcastable to `input`; True = keep. Masked-out pixels do not exist: NaN, inf or garbage
            there changes neither the loss nor a gradient, and their own gradient is exactly 0.
        weight: floating tensor, broadcastable to `input`, the weight of each pixel in both means; 0 means the same as
            masked out. Differentiable.
        reduction: with batch=False, of the images' losses: "mean" divides their sum by the count of images with a
            measured pixel, "sum", or "none": (N,). With batch=True there is one loss, 0-dim.
        denominator: number or 0-dim tensor that the mean of the images' losses divides by instead. It does not split a
            root over all pixels into micro-batches.
        empty: value where no pixel is kept, and with "none" of an image without a kept pixel: "zero" (attached to the
            graph, zero gradients), "nan", or "raise" (ValueError; the host waits for the device, so the call cannot be
            compiled whole).
        variance_focus: from 0, the root mean square of g, to 1, which ignores the scale.
        batch: True: one loss of the pixels of all images. False: one of each image (the first dim).
        eps: added to both depths, in fp32 (in fp16 1e-8 would be 0), at least 0. A predicted 0 then has a gradient of
            up to 1 / eps, which must fit `input`'s dtype. It costs a copy of both in fp32.

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64.

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, `variance_focus` out of range.

    Example:
        >>> depth = torch.tensor([1.0, 2.0, 4.0, 0.0])
        >>> safeops.silog_loss(2 * depth + (depth == 0), depth, variance_focus=1.0) < 1e-6
        tensor(True)
        >>> safeops.silog_loss(depth + (depth == 0), depth)
        tensor(0.)
    """
    if extra or unknown:
        refuse(silog_loss, extra, unknown)
    validate_options(NAME, reduction, empty, variance_focus, batch, eps)
    validate(input, target, mask, weight, reduction, denominator, batch)
    measured, keep = (target > 0) & (target != float("inf")), kept(mask, weight)
    keep = measured if keep is None else measured & keep
    weight = None if weight is None else weight.to(compute_dtype(weight.dtype))  # its two gradients are added wide
    if symbolic(eps) or eps != 0:
        compute = compute_dtype(input.dtype, target.dtype)
        input, target = (x.to(compute) + as_operand(eps, x) for x in (input, target))
    g = _log_ratio.call(input, target, keep, None, "none", None, "zero")
    dims = None if batch else tuple(range(1, input.dim()))
    exists = sums.count(g, keep, dim=dims) > 0
    if empty == "raise" and reduction == "none":
        check.raise_if_empty(NAME, lambda: ~exists, input, "of the pixels")
    nothing = "nan" if empty == "nan" and reduction == "none" else "zero"
    loss = _error.call(g, keep, dims, False, weight, None, nothing, variance_focus)
    return loss_reduction.reduce(NAME, loss, exists, None, reduction, denominator, empty)

"""psnr: the ratio of the data range to the error of images, in decibels."""

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw, only
from safeops.core.op import Composed, Inner
from safeops.core.symbolic import as_operand
from safeops.ops.images._image import ARGUMENTS, finish
from safeops.ops.reductions.masked_rms import _masked_rms, masked_rms

NAME = "psnr"
INF = float("inf")

# ---- definition


def definition(input, target, mask=None, data_range=1.0):
    """Returns (decibels (N,), flags (N,): -1 where an image has no pixel, else 0)."""
    compute = compute_dtype(input.dtype, target.dtype)
    # (the added dim keeps `dims` from being empty, which would mean all dims)
    error = (input.to(compute) - target.to(compute)).unsqueeze(-1)
    keep = None if mask is None else mask.unsqueeze(-1)
    dims = tuple(range(1, error.dim()))
    rms = masked_rms(error, keep, dims)
    equal = rms == 0
    ratio = torch.where(equal, 1, rms) / as_operand(data_range, rms)
    value = torch.where(equal, INF, -20 * torch.log10(ratio))
    return value, torch.where(sums.count(error, keep, dims) > 0, 0, -1)


# ---- op

_forward = declare_raw(
    "_psnr",
    "(Tensor input, Tensor target, Tensor? mask=None, float data_range=1.0) -> (Tensor value, Tensor squares)",
    fake=lambda input, *_: tuple(input.new_empty(input.shape[:1], dtype=d) for d in (torch.float32, torch.float64)),
    triton="images.psnr.psnr",
)
_backward = declare_raw(
    "_psnr_backward",
    "(Tensor grad, Tensor input, Tensor target, Tensor divisor, Tensor? mask=None, bool need_input=True, "
    "bool need_target=True) -> (Tensor, Tensor)",
    fake=lambda grad, *rest: only(rest[-2:], rest[:2]),
    triton="images.psnr.psnr_backward",
)

# ---- record


class Psnr(Inner):
    """The record of the decibels per image. Saved per image: sum ((input - target) / data_range)^2; -1 if no pixel."""

    visible = 2

    def prepare(self, input, target, mask, data_range):
        data_range = float(data_range) if data_range.__class__ is int else data_range
        fits = data_range.__class__ is float and 1e-60 < data_range < 1e60  # in fp64, fp32 squares / data_range^2 fit
        takes = fits and not input.is_cpu and torch.float64 not in (input.dtype, target.dtype)
        return takes, (input, target, mask, data_range)

    def differentiated(self, *operands):
        return self.definition(*operands)[0]

    def gradients(self, grad, needs, operands, results):
        input, target, mask, data_range = operands
        divisor = torch.where(results.squares <= 0, INF, results.squares) * data_range**2
        grad, divisor = (x.reshape([-1] + [1] * (input.dim() - 1)) for x in (grad, divisor))
        return self.backward(grad, input, target, divisor, mask, *needs[:2])


_decibels = Psnr(NAME, _forward, _backward, definition)
_psnr = Composed(NAME, _masked_rms, *sums.ALL)


@_psnr.public(
    '(Tensor input, Tensor target, *, Tensor? mask=None, float data_range=1.0, str reduction="mean", '
    'str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def psnr(input, target, *extra, mask=None, data_range=1.0, reduction="mean", empty="zero", **unknown):
    """Peak signal-to-noise ratio: 20 log10(data_range / rms(input - target)) of each image; the mean over the images.

    The squares of the differences neither overflow nor underflow, nor do they in half. Equal images have the true value
    +inf, and gradient 0, where the usual formula has the gradient NaN.

    Args:
        input: floating tensor (N, ...); half is read as it is.
        target: floating tensor of `input`'s shape. Differentiable, too.
        mask: bool tensor, broadcastable to `input`; True = keep. Masked-out pixels do not exist: NaN, inf or garbage
            there changes neither the result nor a gradient, and their own gradient is exactly 0.
        data_range: the largest minus the smallest value that a pixel may have, greater than 0: 1.0, or 255.0.
        reduction: "mean" over the images, "sum", or "none": (N,).
        {arguments}

    Raises:
        TypeError: an image is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, `data_range` is not above 0, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> x = torch.zeros(2, 3, 8, 8)
        >>> safeops.psnr(x, x + torch.tensor([0.1, 0.01]).reshape(2, 1, 1, 1), reduction="none")
        tensor([20., 40.])
    """
    if extra or unknown:
        refuse(psnr, extra, unknown)
    loss_reduction.validate_options(NAME, reduction, empty)
    check.floating(NAME, "input", input)
    check.floating(NAME, "target", target)
    check.dimensions(NAME, "input", input, 63)
    if input.dim() == 0:
        raise ValueError(f"{NAME}: input must be (N, ...), got shape ()")
    if target.shape != input.shape:
        raise ValueError(f"{NAME}: target {check.shown(target)} must have the shape of input {check.shown(input)}")
    check.mask(NAME, mask, "input", input)
    check.same_device(NAME, "input", input, target=target, mask=mask)
    check.number(NAME, "data_range", data_range, above=0)
    operands = input, target, mask
    if input.dim() == 1:  # each image is one pixel
        operands = (x if x is None else x.unsqueeze(-1) for x in operands)
    value, squares = _decibels.call(*operands, data_range)
    return finish(NAME, value, squares != -1, compute_dtype(input.dtype, target.dtype), reduction, empty)

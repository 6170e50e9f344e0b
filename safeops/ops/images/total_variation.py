"""total_variation: the sum of |difference| over neighbouring pixels."""

import torch

from safeops.core import check, loss_reduction
from safeops.core.definitions import absolute, accumulate, count_kept
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.library import declare_raw, like
from safeops.core.loss_reduction import REDUCTION
from safeops.core.op import Op
from safeops.ops.images._image import ARGUMENTS, nothing, over_all
from safeops.ops.images._ssim import validate_dims

NAME = "total_variation"

# ---- definition


def define(input, mask=None, reduction=1, empty_nan=False):
    """Returns (value, result_slope). value: (N,), each image's sum of |difference| over its pairs of kept neighbours
    (reduction 0), or the mean or sum of these over the images. result_slope: d(value) / d(an image's sum)."""
    dims = tuple(range(1, input.dim()))
    x = input.to(compute_dtype(input.dtype))
    keep = (input.new_ones((), dtype=torch.bool) if mask is None else mask).expand(input.shape)
    total = 0
    for d in dims[1:]:
        n = max(x.shape[d] - 1, 0)
        (first, here), (second, there) = ([t.narrow(d, i if n else 0, n) for t in (x, keep)] for i in (0, 1))
        step = torch.where(here & there, second - first, 0)
        total = total + accumulate(absolute(step), dims).double()
    exists = keep.sum(dims) > 0
    if reduction == 0:
        return torch.where(exists, total, nothing(empty_nan)).to(x.dtype), total.new_empty(0)
    value, result_slope = over_all(accumulate(total, ()), exists.sum(), reduction, empty_nan)
    return value.to(x.dtype), result_slope


# ---- op


def _fake(input, mask, reduction, empty_nan):
    value = input.new_empty((0 if reduction else 1) * input.shape[:1], dtype=compute_dtype(input.dtype))
    return value, input.new_empty(() if reduction else 0, dtype=torch.float64)


_forward = declare_raw(
    "_total_variation",
    "(Tensor input, Tensor? mask=None, int reduction=1, bool empty_nan=False) -> (Tensor value, Tensor result_slope)",
    fake=_fake,
    composite=define,
)
_backward = declare_raw(
    "_total_variation_backward",
    "(Tensor grad, Tensor result_slope, Tensor input, Tensor? mask=None) -> Tensor",
    fake=lambda grad, result_slope, input, mask: like(input, input.shape, input.dtype),
)

# ---- record


class TotalVariation(Op):
    """The record of total_variation. Backward reads the second result, `result_slope`."""

    owner, example = "C++/CUDA", "torch.zeros(1, 3, 16, 16)"

    def prepare(self, input, mask, reduction, empty):
        code = REDUCTION[reduction]
        if empty == "raise":
            self.validate(input, mask, reduction, empty)
            exists = count_kept(mask, input, tuple(range(1, input.dim())), False) > 0
            kept = exists.all() if reduction == "none" else exists
            loss_reduction.raise_if_nothing_kept(NAME, kept, exists.shape, f"{len(exists)} images")
        if code == 1 and empty != "nan":
            return empty in check.EMPTY, (input, mask)
        return empty in check.EMPTY, (input, mask, code, empty == "nan")

    def validate(self, input, mask, reduction, empty):
        loss_reduction.validate_options(NAME, reduction, empty)
        check.floating(NAME, "input", input, numbers=True)
        validate_dims(NAME, input)
        check.mask(NAME, mask, "input", input)
        check.same_device(NAME, "input", input, mask=mask)

    def gradients(self, grad, needs, operands, results):
        return (self.backward(grad, results.result_slope, operands.input, operands.mask),)


_total_variation = TotalVariation(NAME, _forward, _backward, lambda *operands: define(*operands)[0])


@_total_variation.public(
    '(Tensor input, *, Tensor? mask=None, str reduction="mean", str empty="zero") -> Tensor', arguments=ARGUMENTS
)
def total_variation(input, *extra, mask=None, reduction="mean", empty="zero", **unknown):
    """Total variation: the sum of |difference| over neighbouring pixels of each image; the mean over the images.

    Anisotropic: neighbours along each spatial dim. Differences are in fp32, of pairs of kept pixels only; that of equal
    pixels has gradient 0. Rudin et al., "Nonlinear total variation based noise removal algorithms", 1992.

    Args:
        input: floating tensor (N, C, H, W) or (N, C, D, H, W).
        mask: bool tensor, broadcastable to `input`; True = keep. Masked-out pixels do not exist: NaN, inf or garbage
            there changes neither the result nor a gradient, and their own gradient is exactly 0.
        reduction: "mean" over the images, "sum", or "none": (N,). Divide by the number of pixels for a mean over them.
        {arguments}

    Raises:
        TypeError: `input` is not floating, `mask` is not bool.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [0.0, 3.0]]).reshape(1, 1, 2, 2)
        >>> safeops.total_variation(x), safeops.total_variation(x, mask=x < 3)
        (tensor(6.), tensor(1.))
    """
    if extra or unknown:
        refuse(total_variation, extra, unknown)
    return _total_variation.call(input, mask, reduction, empty)

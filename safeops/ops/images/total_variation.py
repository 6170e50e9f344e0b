"""total_variation: how much neighbouring pixels differ."""

import torch

from safeops import _check, _loss
from safeops._definitions import accumulate, magnitude
from safeops._dtypes import compute_dtype
from safeops._library import declare_raw, like
from safeops._op import Op
from safeops.ops.images._image import ARGUMENTS, finish
from safeops.ops.images._ssim import validate_dims

NAME = "total_variation"

# ---- definition


def define(input, mask=None):
    """(2, N) in fp64: the sum of |difference| over each image's pairs of kept neighbours, and how many are kept."""
    dims = tuple(range(1, input.dim()))
    x = input.to(compute_dtype(input.dtype))
    keep = (input.new_ones((), dtype=torch.bool) if mask is None else mask).expand(input.shape)
    total = 0
    for d in dims[1:]:
        n = max(x.shape[d] - 1, 0)
        (first, here), (second, there) = ([t.narrow(d, i if n else 0, n) for t in (x, keep)] for i in (0, 1))
        step = torch.where(here & there, second - first, 0)
        total = total + accumulate(magnitude(step), dims).double()
    return torch.stack([total, keep.sum(dims).double()])


# ---- op

_forward = declare_raw(
    "_total_variation",
    "(Tensor input, Tensor? mask=None) -> Tensor",
    fake=lambda input, mask: input.new_empty((2, *input.shape[:1]), dtype=torch.float64),
    composite=define,
)
_backward = declare_raw(
    "_total_variation_backward",
    "(Tensor grad, Tensor input, Tensor? mask=None) -> Tensor",
    fake=lambda grad, input, mask: like(input, input.shape, input.dtype),
)

# ---- record


class TotalVariation(Op):
    """The op is the sum over each image; what is made of it is a few numbers."""

    owner, example = "C++/CUDA", "torch.zeros(1, 3, 16, 16)"

    def prepare(self, input, mask):
        self.validate(input, mask)
        return True, (input, mask)

    def validate(self, input, mask):
        _check.floating(NAME, "input", input)
        validate_dims(NAME, input)
        _check.mask(NAME, mask, "input", input)
        _check.same_device(NAME, "input", input, mask=mask)

    def gradients(self, grad, needs, operands, results):
        return (self.backward(grad, *operands),)


_total_variation = TotalVariation(NAME, _forward, _backward, define)


@_total_variation.public(
    '(Tensor input, *, Tensor? mask=None, str reduction="mean", str empty="zero") -> Tensor', arguments=ARGUMENTS
)
def total_variation(input, *, mask=None, reduction="mean", empty="zero"):
    """Total variation: the sum of |difference| over neighbouring pixels of each image; the mean over the images.

    Anisotropic: neighbours along each spatial dim. A difference is taken in fp32, and only of two kept pixels; that of
    equal pixels has gradient 0. Rudin et al., "Nonlinear total variation based noise removal algorithms", 1992.

    Args:
        input: floating tensor (N, C, H, W) or (N, C, D, H, W).
        mask: bool tensor, broadcastable to `input`; True = keep. Masked-out pixels do not exist: NaN, inf or garbage
            there changes neither the result nor a gradient, and their own gradient is exactly 0.
        reduction: "mean" over the images, "sum", or "none": (N,). Divide by the pixels for a mean over them.
        {arguments}

    Raises:
        TypeError: `input` is not floating, `mask` is not bool.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [0.0, 3.0]]).reshape(1, 1, 2, 2)
        >>> safeops.total_variation(x), safeops.total_variation(x, mask=x < 3)
        (tensor(6.), tensor(1.))
    """
    _loss.validate_options(NAME, reduction, empty)
    sums = _total_variation.call(input, mask)
    return finish(NAME, sums[0], sums[1].detach(), compute_dtype(input.dtype), reduction, empty)

"""total_variation: how much neighbouring pixels differ."""

from safeops import _check, _loss
from safeops._dtypes import compute_dtype
from safeops._op import Composed, registry
from safeops.ops.images._image import ARGUMENTS, finish
from safeops.ops.images._ssim import validate_dims
from safeops.ops.reductions import masked_count, masked_mean, masked_norm, masked_sum  # noqa: F401  (its parts)

NAME = "total_variation"

_total_variation = Composed(NAME, "masked_norm", "masked_count", "masked_mean", "masked_sum")


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
    _check.floating(NAME, "input", input)
    validate_dims(NAME, input)
    _check.mask(NAME, "mask", mask, "input", input.shape)
    _check.same_device(NAME, "input", input, mask=mask)
    compute, dims = compute_dtype(input.dtype), tuple(range(1, input.dim()))
    keep = None if mask is None else mask.expand(input.shape)
    total, x = 0, input.to(compute)
    for d in dims[1:]:
        n = max(x.shape[d] - 1, 0)
        first, second = (x.narrow(d, i if n else 0, n) for i in (0, 1))
        both = None if keep is None else keep.narrow(d, 0, n) & keep.narrow(d, 1 if n else 0, n)
        total = total + registry["masked_norm"].call(second - first, both, dims, False, None, None, "zero", 1)
    count = registry["masked_count"].call(input, mask, dims, False, None, None, "zero")
    return finish(NAME, total, count, compute, reduction, empty)

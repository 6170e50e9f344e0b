"""ssim: the structural similarity of images."""

from safeops.core.foreign import refuse
from safeops.ops.images._ssim import ARGUMENTS, StructuralSimilarity

_ssim = StructuralSimilarity("ssim")


@_ssim.public(
    "(Tensor input, Tensor target, *, Tensor? mask=None, float data_range=1.0, int win_size=11, float win_sigma=1.5, "
    'float k1=0.01, float k2=0.03, str padding="valid", str reduction="mean", str empty="zero") -> Tensor',
    arguments=ARGUMENTS,
)
def ssim(
    input, target, *extra, mask=None, data_range=1.0, win_size=11, win_sigma=1.5, k1=0.01, k2=0.03, padding="valid",
    reduction="mean", empty="zero", **unknown,
):  # fmt: skip
    """Structural similarity: (2 mx my + C1) (2 cov + C2) / ((mx^2 + my^2 + C1) (var x + var y + C2)), at most 1.

    The moments are those of Gaussian windows; then the mean over all windows of all channels and images. Wang et al.,
    "Image quality assessment: from error visibility to structural similarity", 2004.

    The moments are computed in fp32 relative to the mean of each plane, so that images with a large offset (1000, with
    a range of 1) keep their digits.

    Args:
        {arguments}
        reduction: "mean" over the windows that count, "sum", or "none": the map (N, C, H', W'), of `input`'s shape with
            padding="same", with 0 where a window does not count.

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or the map for "none".

    Raises:
        TypeError: an image is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, a window larger than the image, an even `win_size`, a number out of range,
            devices differ, unknown `padding`, `reduction` or `empty`.

    Example:
        >>> x = torch.linspace(0, 1, 256).reshape(1, 1, 16, 16)
        >>> safeops.ssim(x, x), safeops.ssim(x, 1 - x) < 0
        (tensor(1.), tensor(True))
    """
    if extra or unknown:
        refuse(ssim, extra, unknown)
    return _ssim.loss(
        True, input, target, mask, reduction, None, empty, data_range, win_size, win_sigma, k1, k2, padding
    )

"""ssim_loss: 1 - SSIM."""

from safeops.core.foreign import refuse
from safeops.ops.images._ssim import ARGUMENTS, StructuralSimilarity

_ssim_loss = StructuralSimilarity("ssim_loss", "SSIMLoss")


@_ssim_loss.public(
    '(Tensor input, Tensor target, *, Tensor? mask=None, str reduction="mean", Tensor? denominator=None, '
    'str empty="zero", float data_range=1.0, int win_size=11, float win_sigma=1.5, float k1=0.01, float k2=0.03, '
    'str padding="valid") -> Tensor',
    arguments=ARGUMENTS,
)
def ssim_loss(
    input, target, *extra, mask=None, reduction="mean", denominator=None, empty="zero", data_range=1.0, win_size=11,
    win_sigma=1.5, k1=0.01, k2=0.03, padding="valid", **unknown,
):  # fmt: skip
    """1 - SSIM, the mean over all windows: see `ssim`.

    It is computed without this subtraction: the loss of nearly equal images keeps its digits, and is never below 0.

    Args:
        {arguments}
        reduction: "mean" over the windows that count, "sum", or "none": the map (N, C, H', W'), of `input`'s shape with
            padding="same", with 0 where a window does not count.
        denominator: number or 0-dim tensor that the mean divides by instead.

    Returns:
        fp32 for fp16, bf16 and fp32 operands, fp64 if one is fp64: 0-dim, or the map for "none".

    Raises:
        TypeError: an image is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, a window larger than the image, an even `win_size`, a number out of range,
            devices differ, unknown `padding`, `reduction` or `empty`.

    Example:
        >>> x = torch.linspace(0, 1, 256).reshape(1, 1, 16, 16)
        >>> safeops.ssim_loss(x, x), safeops.ssim_loss(x, 1 - x) > 1
        (tensor(0.), tensor(True))
    """
    if extra or unknown:
        refuse(ssim_loss, extra, unknown)
    return _ssim_loss.loss(
        False, input, target, mask, reduction, denominator, empty, data_range, win_size, win_sigma, k1, k2, padding
    )

"""masked_mean: the mean of the kept elements."""

from safeops.core.foreign import refuse
from safeops.core.sums import masked_mean as _masked_mean


@_masked_mean.public()
def masked_mean(input, mask=None, dim=None, *extra, keepdim=False, weight=None, dtype=None, empty="zero", **unknown):
    """Mean of `input` over the kept elements; with weights, sum(weight * input) / sum(weight).

    It replaces `x[mask].mean()` (which waits for the GPU), `(x * mask).sum() / mask.sum()` (which keeps the NaN, and
    overflows in half) and `torch.masked.mean`. Counts are exact integers. Half is accumulated in fp32 and returned in
    fp32.

    Without `dim` the mean has no dimensions, and `x - masked_mean(x)` keeps x's dtype, half too, as torch promotes.
    With `keepdim=True`, or a `dim`, the difference is fp32.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([6e4, 6e4, torch.inf], dtype=torch.float16)
        >>> safeops.masked_mean(x, x.isfinite())
        tensor(60000.)
    """
    if extra or unknown:
        refuse(masked_mean, extra, unknown)
    return _masked_mean.call(input, mask, dim, keepdim, weight, dtype, empty)

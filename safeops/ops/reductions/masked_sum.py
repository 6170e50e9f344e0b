"""masked_sum: the sum of the kept elements."""

from safeops.core.foreign import refuse
from safeops.core.sums import masked_sum as _masked_sum


@_masked_sum.public()
def masked_sum(input, mask=None, dim=None, *extra, keepdim=False, weight=None, dtype=None, empty="zero", **unknown):
    """Sum of `weight * input` over the kept elements: `mask` True and `weight` not 0.

    Masked-out elements do not exist: NaN, inf or garbage there changes neither the result nor a gradient, and their own
    gradient is exactly 0. Half is accumulated in fp32 and returned in fp32.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
        >>> safeops.masked_sum(x, x.isfinite(), dim=1)
        tensor([1., 5.])
    """
    if extra or unknown:
        refuse(masked_sum, extra, unknown)
    return _masked_sum.call(input, mask, dim, keepdim, weight, dtype, empty)

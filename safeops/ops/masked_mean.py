"""masked_mean: the mean of the kept elements."""

from safeops.ops._reduction import MaskedReduction, declare_reduction

_masked_mean = MaskedReduction("masked_mean", mean=True)


def masked_mean(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    """Mean of `input` over the kept elements; with weights, sum(weight * input) / sum(weight).

    The replacement of `x[mask].mean()` (which waits for the GPU), of `(x * mask).sum() / mask.sum()` (which keeps the
    NaN, and overflows in half) and of `torch.masked.mean`. Counts are exact integers; half is accumulated in fp32 and
    returned in fp32.

    Args:
        input: floating tensor of any shape and strides.
        mask: bool tensor, broadcastable to `input`; True = keep. None keeps all.
        dim: int or tuple of ints; None (or an empty tuple) reduces all dims.
        keepdim: keep the reduced dims with size 1.
        weight: floating tensor, broadcastable to `input`; 0 means the same as masked out.
        dtype: output dtype. None: fp32 for fp16, bf16 and fp32 input, fp64 for fp64.
        empty: where nothing is kept: "zero" gives 0 (attached to the graph, zero gradients), "nan" gives NaN, "raise"
            raises ValueError before any work (and synchronises to know).

    Returns:
        The means, of `input`'s shape without the reduced dims.

    Raises:
        TypeError: `input` or `weight` is not floating, `mask` is not bool, dtype is not floating.
        ValueError: `mask` or `weight` does not broadcast to `input`, devices differ, dim repeats, unknown `empty`.
        IndexError: dim out of range.

    Example:
        >>> x = torch.tensor([6e4, 6e4, torch.inf], dtype=torch.float16)
        >>> safeops.masked_mean(x, x.isfinite())
        tensor(60000.)
    """
    return _masked_mean.call(input, mask, dim, keepdim, weight, dtype, empty)


declare_reduction(masked_mean)

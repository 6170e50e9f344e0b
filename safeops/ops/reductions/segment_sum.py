"""segment_sum: the sum of each sequence of a packed batch."""

from safeops.core.foreign import refuse
from safeops.ops.reductions._segment import LinearSegments

_segment_sum = LinearSegments("segment_sum", mean=False)


@_segment_sum.public()
def segment_sum(
    input, *extra, cu_seqlens=None, segment_ids=None, num_segments=None, mask=None, weight=None, empty="zero",
    **unknown,
):  # fmt: skip
    """Sum of `input` over the kept rows of each sequence of a packed batch; with weights, of weight * input.

    It replaces `torch.segment_reduce`, `zeros.index_add_(0, ids, x * mask)` (which adds fp32 one after the other, on
    CUDA in another order each time, keeps the NaN, and overflows in half) and differences of a cumsum (which lose the
    digits of small sequences, and spread one NaN over all sequences behind it).

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([1.0, 2.0, torch.nan, 4.0])
        >>> safeops.segment_sum(x, cu_seqlens=torch.tensor([0, 2, 2, 4]), mask=x.isfinite())
        tensor([3., 0., 4.])
    """
    if extra or unknown:
        refuse(segment_sum, extra, unknown)
    return _segment_sum.call(input, cu_seqlens, segment_ids, num_segments, mask, weight, empty)

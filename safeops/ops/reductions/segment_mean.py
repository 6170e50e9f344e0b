"""segment_mean: the mean of each sequence of a packed batch."""

from safeops.core.foreign import refuse
from safeops.ops.reductions._segment import LinearSegments

_segment_mean = LinearSegments("segment_mean", mean=True)


@_segment_mean.public()
def segment_mean(
    input, *extra, cu_seqlens=None, segment_ids=None, num_segments=None, mask=None, weight=None, empty="zero",
    **unknown,
):  # fmt: skip
    """Mean of `input` over the kept rows of each sequence; with weights, sum(weight * input) / sum(weight).

    For a loss of packed sequences that counts each sequence once, whatever its length. Counts are exact integers, also
    where the elements of a row have different masks. Half is accumulated in fp32 and returned in fp32.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([1.0, 2.0, torch.nan, 4.0])
        >>> ids = torch.tensor([1, 1, 0, 0])
        >>> safeops.segment_mean(x, segment_ids=ids, num_segments=2, mask=x.isfinite())
        tensor([4.0000, 1.5000])
    """
    if extra or unknown:
        refuse(segment_mean, extra, unknown)
    return _segment_mean.call(input, cu_seqlens, segment_ids, num_segments, mask, weight, empty)

"""segment_max: the largest of the kept rows of each sequence of a packed batch."""

import torch

from safeops.core.foreign import refuse
from safeops.ops.reductions._segment import SegmentReduction


def _finish(k, count):
    """Returns (largest kept element, number of elements equal to it) per sequence. These share its gradient evenly."""
    top = k.largest()
    of_rows = k.of_rows(top)
    ties = k.select((k.x == of_rows) | (k.x.isnan() & of_rows.isnan()), False)
    number = k.number(ties)
    # For a finite top, x - base is 0 at the ties: the value stays exactly top, and each tie's gradient is 1 / number.
    base = torch.where(top.isfinite(), top, 0)
    extra = k.sum(torch.where(ties, k.x - k.of_rows(base), 0))
    return base + extra / number.clamp(min=1), number


class LargestOfSegments(SegmentReduction):
    """The record of segment_max. Forward reads input and mask once; backward reads them, and writes the gradient."""

    saved = ("value", "denominator")

    def gradients(self, grad, needs, operands, results):
        x = operands.input
        return (self.backward(grad, x.shape, x.dtype, results.denominator, x, results.value, *operands[1:5]),)


_segment_max = LargestOfSegments("segment_max", _finish)


@_segment_max.public()
def segment_max(
    input, *extra, cu_seqlens=None, segment_ids=None, num_segments=None, mask=None, weight=None, empty="zero",
    **unknown,
):  # fmt: skip
    """The largest kept row of each sequence of a packed batch, for each column. A kept NaN shows.

    It replaces `torch.segment_reduce(x, "max")` and `scatter_reduce(..., "amax")`. Equal largest elements share the
    gradient evenly. A weight of 0 masks its element out; any other weight changes nothing.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([1.0, 7.0, 3.0, 5.0])
        >>> safeops.segment_max(x, cu_seqlens=torch.tensor([0, 2, 4]), mask=x < 6)
        tensor([1., 5.])
    """
    if extra or unknown:
        refuse(segment_max, extra, unknown)
    return _segment_max.call(input, cu_seqlens, segment_ids, num_segments, mask, weight, empty)

"""masked_count: how many elements are kept."""

import torch

from safeops.core import check
from safeops.core.foreign import refuse
from safeops.core.sums import masked_count as _masked_count


@_masked_count.public(
    "(Tensor input, Tensor? mask=None, int[1]? dim=None, *, bool keepdim=False, Tensor? weight=None, "
    'ScalarType? dtype=None, str empty="zero") -> Tensor'
)
def masked_count(input, mask=None, dim=None, *extra, keepdim=False, weight=None, dtype=None, empty="zero", **unknown):
    """How many elements of `input` are kept: `mask` True and `weight` not 0. Exact, and never waits for the GPU.

    `masked_count(mask)` replaces `mask.sum()` and `mask.float().sum()` (fp32 counts to 2^24 and no further).
    `masked_count(x, mask)` replaces `mask.expand_as(x).sum()` and `x[mask].numel()`.

    Args:
        input: tensor of any shape and dtype (except 8-bit floats). In a bool tensor the True elements count, with a
            mask those that it keeps. Of any other tensor only the shape is read: a 0 or a NaN counts as well.
        mask: bool tensor, broadcastable to `input`; True = keep. None keeps all.
        dim: int or tuple of ints; None (or an empty tuple) reduces all dims.
        keepdim: keep the reduced dims with size 1.
        weight: floating tensor, broadcastable to `input`; 0 means the same as masked out.
        dtype: output dtype: int64 (None), int32, or a floating one, to which the exact count is rounded once.
        empty: where nothing is kept: "zero" gives 0, "nan" gives NaN (with a floating dtype), "raise" raises ValueError
            (the host waits for the device, so the call cannot be compiled whole).

    Returns:
        The counts, of `input`'s shape without the reduced dims. Not differentiable.

    Raises:
        TypeError: `input` is not a tensor, `weight` is not floating, `mask` is not bool, dtype is none of the above.
        ValueError: `mask` or `weight` does not broadcast to `input`, devices differ, dim repeats, unknown `empty`,
            "nan" in an integer dtype.
        IndexError: dim out of range.

    Example:
        >>> x = torch.zeros(2, 3)
        >>> safeops.masked_count(x, torch.tensor([True, False, True]), dim=1)
        tensor([2, 2])
        >>> safeops.masked_count(torch.tensor([True, False, True]))
        tensor(2)
    """
    if extra or unknown:
        refuse(masked_count, extra, unknown)
    count = _masked_count.call(input, mask, dim, keepdim, weight, dtype, empty)
    if empty == "raise":
        check.raise_if_empty("masked_count", lambda: count == 0, input, dim)
    if empty == "nan":
        count = torch.where(count == 0, float("nan"), count.double())
    return count if dtype is None else count.to(dtype)

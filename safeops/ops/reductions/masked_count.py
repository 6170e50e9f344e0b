"""masked_count: how many elements are kept."""

import torch

from safeops.core import check
from safeops.core.definitions import count_kept, kept
from safeops.core.dtypes import FLOATING
from safeops.core.library import declare_raw
from safeops.core.op import Op
from safeops.ops.reductions._reduction import as_dims, output_shape, validate

# ---- definition


def definition(input, mask=None, weight=None, dim=None, keepdim=False):
    dims = check.dims("masked_count", dim, input.dim())
    if mask is None and input.dtype == torch.bool:
        mask = input
    return count_kept(kept(mask, weight), input, dims, keepdim)


# ---- record


def _fake(input, mask=None, weight=None, dim=None, keepdim=False):
    return input.new_empty(output_shape(input.shape, dim, keepdim), dtype=torch.int64)


_raw = declare_raw(
    "_masked_count",
    "(Tensor input, Tensor? mask=None, Tensor? weight=None, int[]? dim=None, bool keepdim=False) -> Tensor",
    fake=_fake,
    composite=definition,
    triton="reductions.masked_count.masked_count",
)


class MaskedCount(Op):
    differentiable, shards = (), "count"

    def prepare(self, input, mask, dim, keepdim, weight, dtype, empty):
        if dtype is not None or empty != "zero" or not isinstance(keepdim, bool):
            self.validate(input, mask, dim, keepdim, weight, dtype, empty)
        boolean = input.dtype == torch.bool
        takes = boolean or input.dtype in FLOATING
        if mask is None and not takes:
            self.validate(input, mask, dim, keepdim, weight, dtype, empty)
        if boolean and mask is input:
            mask = None
        elif boolean and mask is not None:
            self.validate(input, mask, dim, keepdim, weight, dtype, empty)  # (`&` broadcasts both ways)
            mask = input & mask
        return takes, (input, mask, weight, as_dims("masked_count", dim), keepdim)

    def validate(self, input, mask, dim, keepdim, weight, dtype, empty):
        check.tensor("masked_count", "input", input)
        validate("masked_count", input, mask, weight, dim, keepdim)
        if dtype is not None and dtype not in _DTYPES:
            raise TypeError(f"masked_count: dtype must be int64, int32 or a floating point dtype, got {dtype}")
        check.choice("masked_count", "empty", empty, check.EMPTY)
        if empty == "nan" and dtype not in FLOATING:
            raise ValueError(f'masked_count: empty="nan" needs a floating point dtype, got {dtype or torch.int64}')

    def validate_operands(self, input, mask, weight, dim, keepdim):
        self.validate(input, mask, dim, keepdim, weight, None, "zero")


_DTYPES = (torch.int64, torch.int32, *FLOATING)
_masked_count = MaskedCount("masked_count", _raw, definition=definition)

# ---- public function


@_masked_count.public(
    "(Tensor input, Tensor? mask=None, int[1]? dim=None, *, bool keepdim=False, Tensor? weight=None, "
    'ScalarType? dtype=None, str empty="zero") -> Tensor'
)
def masked_count(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    """How many elements of `input` are kept: `mask` True and `weight` not 0. Exact, and never waits for the GPU.

    `masked_count(mask)` is the replacement of `mask.sum()` and of `mask.float().sum()` (fp32 counts to 2^24 and no
    further), `masked_count(x, mask)` that of `mask.expand_as(x).sum()` and of `x[mask].numel()`.

    Args:
        input: tensor of any shape and dtype (but floats of 8 bits). Of a bool tensor the True elements count, with a
            mask those that it keeps. Of any other only the shape is read: a 0 or a NaN counts as well.
        mask: bool tensor, broadcastable to `input`; True = keep. None keeps all.
        dim: int or tuple of ints; None (or an empty tuple) reduces all dims.
        keepdim: keep the reduced dims with size 1.
        weight: floating tensor, broadcastable to `input`; 0 means the same as masked out.
        dtype: output dtype: int64 (None), int32, or a floating one, to which the exact count is rounded once.
        empty: where nothing is kept: "zero" gives 0, "nan" gives NaN (with a floating dtype), "raise" raises ValueError
            (synchronises to know, and cannot be compiled whole).

    Returns:
        The counts, of `input`'s shape without the reduced dims. Not differentiable.

    Raises:
        TypeError: `input` is no tensor, `weight` is not floating, `mask` is not bool, dtype is not one of the above.
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
    count = _masked_count.call(input, mask, dim, keepdim, weight, dtype, empty)
    if empty == "raise":
        check.raise_if_empty("masked_count", lambda: count == 0, input, dim)
    if empty == "nan":
        count = torch.where(count == 0, float("nan"), count.double())
    return count if dtype is None else count.to(dtype)

"""masked_count: how many elements are kept."""

import torch

from safeops import _check, _route
from safeops._dtypes import FLOATING
from safeops._library import Op, declare_public, declare_raw
from safeops.ops._reduction import EMPTY, INTS, count_kept, kept, output_shape, raise_if_empty, validate

# ---- definition


def definition(input, mask=None, weight=None, dim=None, keepdim=False):
    dims = _check.dims("masked_count", dim, input.dim())
    return count_kept(kept(mask, weight), input, dims, keepdim)


# ---- op


def _fake(input, mask=None, weight=None, dim=None, keepdim=False):
    return input.new_empty(output_shape(input.shape, dim, keepdim), dtype=torch.int64)


_raw = declare_raw(
    "_masked_count",
    "(Tensor input, Tensor? mask=None, Tensor? weight=None, int[]? dim=None, bool keepdim=False) -> Tensor",
    fake=_fake,
    composite=definition,
    triton="masked_count.masked_count",
)
OP = Op("masked_count", ("_masked_count",), "Triton", _raw)  # a count has no gradient, and so no Function

# ---- public function

_DTYPES = (torch.int64, torch.int32, *FLOATING)


def masked_count(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    """How many elements of `input` are kept: `mask` True and `weight` not 0. Exact, and never waits for the GPU.

    The replacement of `mask.expand_as(x).sum()`, of `mask.float().sum()` (fp32 counts to 2^24 and no further) and of
    `x[mask].numel()`.

    Args:
        input: tensor of any shape and dtype (but floats of 8 bits). Only its shape is read: a NaN counts as well.
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
        ValueError: `mask` or `weight` does not broadcast to `input`, devices differ, dim repeats, unknown `empty`, or
            "nan" in an integer dtype.
        IndexError: dim out of range.

    Example:
        >>> x = torch.zeros(2, 3)
        >>> safeops.masked_count(x, torch.tensor([True, False, True]), dim=1)
        tensor([2, 2])
    """
    if dim is not None:
        dims = dim if isinstance(dim, (tuple, list)) else (dim,)
        # (the dispatcher would take a bool or a tensor for a number)
        dim = dims if INTS.issuperset(map(type, dims)) else _check.integers("masked_count", dim)
    plain = dtype is None and empty == "zero"
    try:
        kernel = _route.kernel(OP, input, mask, weight) if input.dtype in FLOATING else None
        if kernel is not None:
            if kernel is OP.traced or not plain or not isinstance(keepdim, bool):
                _validate(input, mask, weight, dim, keepdim, dtype, empty)
            count = kernel.raw(input, mask, weight, dim, keepdim)
            return count if plain else _finish(count, input, dim, dtype, empty)
    except Exception:
        _check.explain(_validate, input, mask, weight, dim, keepdim, dtype, empty)
        raise
    _validate(input, mask, weight, dim, keepdim, dtype, empty)
    return _finish(definition(input, mask, weight, dim, keepdim), input, dim, dtype, empty)


def _finish(count, input, dim, dtype, empty):
    if empty == "raise":
        raise_if_empty("masked_count", count == 0, input, dim)
    if empty == "nan":
        count = torch.where(count == 0, float("nan"), count.double())
    return count if dtype is None else count.to(dtype)


def _validate(input, mask, weight, dim, keepdim, dtype, empty):
    _check.tensor("masked_count", "input", input)
    validate("masked_count", input, mask, weight, dim, keepdim)
    if dtype is not None and dtype not in _DTYPES:
        raise TypeError(f"masked_count: dtype must be int64, int32 or a floating point dtype, got {dtype}")
    _check.choice("masked_count", "empty", empty, EMPTY)
    if empty == "nan" and dtype not in FLOATING:
        raise ValueError(f'masked_count: empty="nan" needs a floating point dtype, got {dtype or torch.int64}')


declare_public(
    masked_count,
    "masked_count(Tensor input, Tensor? mask=None, int[1]? dim=None, *, bool keepdim=False, Tensor? weight=None, "
    'ScalarType? dtype=None, str empty="zero") -> Tensor',
)

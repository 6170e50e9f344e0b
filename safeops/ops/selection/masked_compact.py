"""masked_compact: x[mask] with a fixed capacity, so that the host does not wait for the count."""

from typing import NamedTuple

import torch

from safeops.core import check, route
from safeops.core.foreign import REQUIRED, refuse, require
from safeops.core.library import declare_raw
from safeops.core.op import Op
from safeops.core.private_torch import saved_by_name
from safeops.ops.selection._selection import MOVABLE, as_double, check_fill, check_movable, select_rows


@saved_by_name
class MaskedCompact(NamedTuple):
    values: torch.Tensor
    index: torch.Tensor
    count: torch.Tensor


# ---- definition


def definition(input, mask, capacity, fill_value=0.0):
    """Returns (values, index, count). mask has the shape of input's first dims: all, or those that number the rows."""
    flat = mask.reshape(-1)  # (N,)
    rank = flat.cumsum(0)  # for each element, the number of kept ones up to and including it
    count = flat.sum()
    slot = torch.arange(capacity, device=mask.device)
    # the k-th kept element is the first with rank k + 1
    index = torch.where(slot < count, torch.searchsorted(rank, slot + 1), -1)
    return _take(input, index, mask.dim(), fill_value), index, count


def _take(input, index, lead, fill_value=0.0):
    """Slot k gets row index[k] of input, or `fill_value` if that is -1. The first `lead` dims number the rows."""
    rows = 1
    for n in input.shape[:lead]:  # torch.Size.numel would make constants of dynamic sizes
        rows = rows * n
    return select_rows(input.reshape(rows, *input.shape[lead:]), index, fill_value)


# ---- op


def _fake(input, mask, capacity, fill_value=0.0):
    return (
        input.new_empty((capacity, *input.shape[mask.dim() :])),
        input.new_empty((capacity,), dtype=torch.int64),
        input.new_empty((), dtype=torch.int64),
    )


def _fake_backward(grad, index, size):
    return grad.new_empty(size)


_forward = declare_raw(
    "_masked_compact",
    "(Tensor input, Tensor mask, SymInt capacity, float fill_value=0.0) -> (Tensor values, Tensor index, Tensor count)",
    fake=_fake,
    composite=definition,
)
_backward = declare_raw(
    "_masked_compact_backward", "(Tensor grad, Tensor index, SymInt[] size) -> Tensor", fake=_fake_backward
)

# ---- record


class Compaction(Op):
    owner = "C++/CUDA"
    linear = 1
    visible = 3
    saved = ("index",)
    reads = ()

    def prepare(self, input, mask, capacity, fill_value):
        takes = input.dtype in MOVABLE
        if not (capacity.__class__ is int and fill_value.__class__ is int and fill_value == 0):
            self.validate(input, mask, capacity, fill_value)
            double = as_double(fill_value)
            takes, fill_value = takes and double is not None, fill_value if double is None else double
        if mask.shape != input.shape:
            mask = mask.expand(input.shape[: mask.dim()])
        if fill_value.__class__ is int and fill_value == 0:
            return takes, (input, mask, capacity)
        return takes, (input, mask, capacity, fill_value)

    def validate(self, input, mask, capacity, fill_value):
        require("masked_compact", capacity=capacity)
        check_movable("masked_compact", "input", input)
        check.boolean("masked_compact", "mask", mask, "True = keep")
        if mask.dim() > input.dim() or not all(map(check.stretches, mask.shape, input.shape)):
            raise ValueError(
                f"masked_compact: mask {check.shown(mask)} does not broadcast to the first {mask.dim()} dims of input "
                f"{check.shown(input)}"
            )
        check.same_device("masked_compact", "input", input, mask=mask)
        check.no_dtensor("masked_compact", "input", input)
        if isinstance(capacity, bool) or not isinstance(capacity, (int, torch.SymInt)):
            raise TypeError(f"masked_compact: capacity must be an int, got {type(capacity).__name__}")
        if capacity < 0:
            raise ValueError(f"masked_compact: capacity must be at least 0, got {capacity}")
        # (a symbolic capacity is not compared: that would restrict it)
        if isinstance(capacity, int) and capacity >= 2**59:
            raise ValueError(
                f"masked_compact: capacity must be less than 2^59, got {capacity}: no memory holds so many"
            )
        check_fill("masked_compact", fill_value, input.dtype)

    # Backward: the gradient of input is grad[k] at row index[k], 0 at all other rows.

    def gradients(self, grad, needs, operands, results):
        return (self.backward(grad, results.index, operands.input.shape),)

    def composite_gradients(self, grad, needs, operands, results):
        shape = operands.input.shape
        # The op is linear in its input, so the derivative may be taken at 0.
        origin = torch.zeros((), dtype=grad.dtype, device=grad.device).expand(shape).requires_grad_()
        lead = len(shape) - (grad.dim() - 1)
        return route.differentiable_backward(_take, (origin, results.index, lead), grad)[:1]


_masked_compact = Compaction("masked_compact", _forward, _backward, definition)

# ---- public function


@_masked_compact.public(
    "(Tensor input, Tensor mask, *, SymInt capacity, Scalar fill_value=0) -> "
    "(Tensor values, Tensor index, Tensor count)"
)
def masked_compact(input, mask, *extra, capacity=REQUIRED, fill_value=0, **unknown):
    """The kept elements, or rows, packed into `capacity` slots: `input[mask]` without waiting for its size.

    `input[mask]` has a size that only the device knows: the host waits for it, and neither a CUDA graph nor
    `torch.compile(fullgraph=True)` can hold it. Here the size is given, and count and index are tensors.

        values, index, count = safeops.masked_compact(x, mask, capacity=4096)

    Slot `k < count` holds the k-th kept element in the order of `input[mask]`; the slots behind hold `fill_value`.
    Elements that do not fit are dropped; then `count > capacity`. The gradient reaches the elements in the slots, and
    is exactly 0 for all others. Two runs give the same bits.

    To put values back: `safeops.masked_scatter(x, mask, values)`, for rows with the mask unsqueezed to x's dims. To
    take rows of another tensor: `safeops.safe_index_select(y, 0, index)`, for which the -1 of an unused slot is out of
    range (in torch's indexing it is the last row).

    Args:
        input: tensor of any dtype and strides. Keeps its dtype, also under autocast.
        mask: bool tensor; True = keep. With as many dims as `input` (broadcast to it) it keeps elements; with fewer
            it stands for the first dims and keeps rows, as in `input[mask]`.
        capacity: number of slots, at least 0.
        fill_value: the value of unused slots; a finite one saturates to the dtype.

    Returns:
        A named tuple of
        values: (capacity, *rest) in `input`'s dtype, `rest` the dims behind those of the mask.
        index: (capacity,) int64; the flat position in the mask (broadcast) of each slot, -1 in unused ones.
        count: 0-dim int64, the number of True in the mask; may exceed `capacity`.

    Raises:
        TypeError: `input` or `mask` is not a tensor, `mask` is not bool, `capacity` is not an int, `fill_value` is not
            a number.
        ValueError: `mask` does not broadcast to the (first) dims of `input`, devices differ, `capacity` is negative.

    Example:
        >>> x = torch.tensor([3.0, torch.nan, 5.0, 7.0])
        >>> values, index, count = safeops.masked_compact(x, x.isfinite(), capacity=4)
        >>> values, index, int(count)
        (tensor([3., 5., 7., 0.]), tensor([ 0,  2,  3, -1]), 3)
    """
    if extra or unknown:
        refuse(masked_compact, extra, unknown)
    return MaskedCompact(*_masked_compact.call(input, mask, capacity, fill_value))

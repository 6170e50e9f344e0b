"""masked_select: as torch.masked_select, with a backward that is parallel and deterministic."""

import torch
from torch.compiler import is_compiling

from safeops import _check, _route
from safeops._library import Op, declare_public
from safeops.ops._selection import MOVABLE, check_movable
from safeops.ops.masked_compact import _masked_compact, expand_rows
from safeops.ops.masked_sum import reduce_to

# ---- definition


def definition(input, mask):
    return torch.masked_select(input, mask)


# ---- op: counted, then compacted to exactly that capacity


def _select(input, mask):
    """(values, index, the common shape)"""
    if mask.shape != input.shape:
        shape = torch.broadcast_shapes(input.shape, mask.shape)
        input, mask = input.expand(shape), mask.expand(shape)
    count = int(_masked_compact._op(input, mask, 0)[2])  # the host waits here
    return *_masked_compact._op(input, mask, count)[:2], input.shape


# ---- autograd


class _MaskedSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, mask):
        values, index, full = _select(input, mask)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        ctx.shapes = input.shape, full
        return values

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None
        (index,), (shape, full) = ctx.saved_tensors, ctx.shapes
        dx = expand_rows(grad, index, full)
        if shape == full:
            return dx, None
        return (dx.sum_to_size(shape) if _route.by_composite(grad) else reduce_to(dx, shape, grad.dtype)), None


OP = Op("masked_select", ("_masked_compact", "_masked_compact_backward"), "C++/CUDA", _masked_compact, _MaskedSelect)

# ---- public function


def masked_select(input, mask):
    """The kept elements as a vector: as `torch.masked_select`.

    The result's size depends on the mask, so the host waits for the device, and a compiled function breaks there (or
    takes an unbacked size, if told to); `masked_compact` is the same without that. The gradient is exactly 0 for
    elements that are not kept, and the same bits every time.

    Args:
        input: tensor of any dtype and strides. Keeps its dtype, also under autocast.
        mask: bool tensor; True = keep. It and `input` are broadcast together.

    Returns:
        A vector of `input`'s dtype, in the order of the elements.

    Raises:
        TypeError: `input` or `mask` is no tensor, `mask` is not bool.
        ValueError: shapes do not broadcast, devices differ.

    Example:
        >>> safeops.masked_select(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True]))
        tensor([1., 3.])
    """
    try:
        kernel = None
        if input.dtype in MOVABLE and not is_compiling():
            kernel = _route.kernel(OP, input, mask)
        if kernel is not None:
            if torch.is_grad_enabled() and input.requires_grad:
                return kernel.apply(input, mask)
            return _select(input, mask)[0]
    except Exception:
        _validate(input, mask)
        raise
    _validate(input, mask)
    return definition(input, mask)


def _validate(input, mask):
    check_movable("masked_select", "input", input)
    _check.boolean("masked_select", "mask", mask, "True = keep")
    _check.broadcast("masked_select", mask=mask, input=input)
    _check.same_device("masked_select", "input", input, mask=mask)


declare_public(masked_select, "masked_select(Tensor input, Tensor mask) -> Tensor")

"""masked_select: as torch.masked_select, with a backward that is parallel and deterministic."""

import torch
from torch.compiler import is_compiling

from safeops import _check, _route
from safeops._dtypes import signed
from safeops._library import Op, declare_public, declare_raw
from safeops.ops._selection import MOST_DIMS, MOVABLE, check_movable
from safeops.ops.masked_compact import _masked_compact
from safeops.ops.masked_scatter import _masked_scatter
from safeops.ops.masked_scatter import definition as scattered
from safeops.ops.masked_sum import reduce_to

# ---- definition


def definition(input, mask):
    return torch.masked_select(signed(input), mask).to(input.dtype)


# ---- op


def _fake(input, mask):
    return input.new_empty(torch.library.get_ctx().new_dynamic_size())


def _composite(input, mask):
    """Where there is no kernel of its own: counted, then compacted to exactly that capacity."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    input, mask = input.expand(shape), mask.expand(shape)
    return _masked_compact(input, mask, int(mask.sum()))[0]  # the host waits here


_masked_select = declare_raw(
    "_masked_select", "(Tensor input, Tensor mask) -> Tensor", fake=_fake, composite=_composite
)

# ---- autograd


class _MaskedSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, mask):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(mask)
        ctx.shape = input.shape
        return _masked_select(input, mask)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return None, None
        (mask,), shape = ctx.saved_tensors, ctx.shape
        # The gradient of the input: the next of grad wherever the mask is True, 0 elsewhere.
        zero = torch.zeros((), dtype=grad.dtype, device=grad.device)
        full = shape if mask.shape == shape else torch.broadcast_shapes(shape, mask.shape)
        if _route.by_composite(grad):
            return scattered(zero.expand(full), mask, grad).sum_to_size(shape), None
        return reduce_to(_masked_scatter(zero, mask.expand(full), grad), shape, grad.dtype), None


OP = Op("masked_select", ("_masked_select", "_masked_scatter"), "C++/CUDA", _masked_select, _MaskedSelect)

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
            return kernel.raw(input, mask)
    except Exception:
        _check.explain(_validate, input, mask)
        raise
    _validate(input, mask)
    return definition(input, mask)


def _validate(input, mask):
    check_movable("masked_select", "input", input)
    _check.boolean("masked_select", "mask", mask, "True = keep")
    _check.dimensions("masked_select", "mask", mask, MOST_DIMS)
    _check.broadcast("masked_select", mask=mask, input=input)
    _check.same_device("masked_select", "input", input, mask=mask)
    _check.no_dtensor("masked_select", "input", input)


declare_public(masked_select, "masked_select(Tensor input, Tensor mask) -> Tensor")

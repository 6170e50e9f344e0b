"""masked_select: as torch.masked_select, with a backward that is parallel and deterministic."""

import torch

from safeops.core import check
from safeops.core.dtypes import signed
from safeops.core.library import declare_raw
from safeops.core.op import Op
from safeops.core.sums import sum_to
from safeops.ops.selection._selection import MOST_DIMS, MOVABLE, check_movable
from safeops.ops.selection.masked_compact import _masked_compact
from safeops.ops.selection.masked_scatter import _masked_scatter
from safeops.ops.selection.masked_scatter import definition as scattered

# ---- definition


def definition(input, mask):
    return torch.masked_select(signed(input), mask).to(input.dtype)


# ---- op


def _fake(input, mask):
    return input.new_empty(torch.library.get_ctx().new_dynamic_size())


def _composite(input, mask):
    """For devices without a kernel: count the True elements, then run masked_compact with this capacity."""
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    input, mask = input.expand(shape), mask.expand(shape)
    return _masked_compact.forward(input, mask, int(mask.sum()))[0]  # the host waits here


_forward = declare_raw("_masked_select", "(Tensor input, Tensor mask) -> Tensor", fake=_fake, composite=_composite)

# ---- record


class MaskedSelect(Op):
    owner = "C++/CUDA"
    sum_to = staticmethod(sum_to)
    linear = 1
    waits = True
    compiled = ()  # a trace does not know the result's size

    def prepare(self, input, mask):
        return input.dtype in MOVABLE, (input, mask)

    def validate(self, input, mask):
        check_movable("masked_select", "input", input)
        check.boolean("masked_select", "mask", mask, "True = keep")
        check.dimensions("masked_select", "mask", mask, MOST_DIMS)
        check.broadcast("masked_select", mask=mask, input=input)
        check.same_device("masked_select", "input", input, mask=mask)
        check.no_dtensor("masked_select", "input", input)

    # Backward: the gradient of input has the elements of grad, in order, where the mask is True, and 0 elsewhere.

    def gradients(self, grad, needs, operands, results):
        return (self.backward(*_scattered(grad, *operands)),)

    def composite_gradients(self, grad, needs, operands, results):
        return (scattered(*_scattered(grad, *operands)).sum_to_size(operands.input.shape),)


def _scattered(grad, input, mask):
    full = input.shape if mask.shape == input.shape else torch.broadcast_shapes(input.shape, mask.shape)
    return torch.zeros((), dtype=grad.dtype, device=grad.device).expand(full), grad, mask.expand(full)


_masked_select = MaskedSelect("masked_select", _forward, _masked_scatter.forward, definition)

# ---- public function


@_masked_select.public("(Tensor input, Tensor mask) -> Tensor")
def masked_select(input, mask):
    """The kept elements as a vector: as `torch.masked_select`.

    The result's size depends on the mask. So the host waits for the device, and a compiled function has a graph break
    here (or an unbacked size, if torch is configured so). `masked_compact` avoids both. The gradient is exactly 0 for
    elements that are not kept, and the same bits every time.

    Args:
        input: tensor of any dtype and strides. Keeps its dtype, also under autocast.
        mask: bool tensor; True = keep. It and `input` are broadcast together.

    Returns:
        A vector of `input`'s dtype, in the order of the elements.

    Raises:
        TypeError: `input` or `mask` is not a tensor, `mask` is not bool.
        ValueError: shapes do not broadcast, devices differ.

    Example:
        >>> safeops.masked_select(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True]))
        tensor([1., 3.])
    """
    return _masked_select.call(input, mask)

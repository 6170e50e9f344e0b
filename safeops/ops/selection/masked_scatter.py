"""masked_scatter: the elements of a source, in order, where the mask is True."""

import torch

from safeops.core import check
from safeops.core.dtypes import where
from safeops.core.library import declare_raw, like
from safeops.core.op import Op
from safeops.core.sums import sum_to
from safeops.ops.selection._selection import MOST_DIMS, MOVABLE, check_movable, select_rows

# ---- definition


def definition(input, source, mask):
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    flat = mask.expand(shape).reshape(-1)
    rank = flat.cumsum(0) - 1  # for a True element, the number of True elements before it
    taken = flat & (rank < source.numel())
    fresh = select_rows(source.reshape(-1), torch.where(taken, rank, -1), 0)
    return where(taken.reshape(shape), fresh.reshape(shape), input)


# ---- op


def _fake(input, source, mask):
    return like(input, torch.broadcast_shapes(input.shape, mask.shape), input.dtype)


def _fake_backward(grad, mask, source_size):
    return grad.new_empty(grad.shape), grad.new_empty(source_size)


_forward = declare_raw(
    "_masked_scatter", "(Tensor input, Tensor source, Tensor mask) -> Tensor", fake=_fake, composite=definition
)
_backward = declare_raw(
    "_masked_scatter_backward",
    "(Tensor grad, Tensor mask, SymInt[] source_size) -> (Tensor, Tensor)",
    fake=_fake_backward,
)

# ---- record


class MaskedScatter(Op):
    owner = "C++/CUDA"
    differentiable = ("input", "source")
    sum_to = staticmethod(sum_to)
    linear = 2

    def prepare(self, input, mask, source):
        return input.dtype in MOVABLE and source.dtype == input.dtype, (input, source, mask)

    def validate(self, input, mask, source):
        check_movable("masked_scatter", "input", input)
        check.boolean("masked_scatter", "mask", mask, "True = overwrite")
        check.tensor("masked_scatter", "source", source)
        if source.dtype != input.dtype:
            raise TypeError(f"masked_scatter: source is {source.dtype}, input is {input.dtype}: they must be the same")
        check.dimensions("masked_scatter", "mask", mask, MOST_DIMS)
        check.dimensions("masked_scatter", "source", source, MOST_DIMS)
        check.broadcast("masked_scatter", mask=mask, input=input)
        check.same_device("masked_scatter", "input", input, mask=mask, source=source)
        check.no_dtensor("masked_scatter", "input", input)

    def gradients(self, grad, needs, operands, results):
        return self.backward(grad, operands.mask, operands.source.shape)


_masked_scatter = MaskedScatter("masked_scatter", _forward, _backward, definition)

# ---- public function


@_masked_scatter.public("(Tensor input, Tensor mask, Tensor source) -> Tensor")
def masked_scatter(input, mask, source):
    """`input` with the elements of `source`, one after the other, where `mask` is True.

    As `torch.masked_scatter`, except that a `source` with fewer elements than the mask has True is not an error: to
    know, the host would have to read the mask. Where the source has ended, `input` stays, and gets its gradient. The
    gradients of `input` where it was overwritten, and of source elements that were not used, are exactly 0.

    Args:
        input: tensor of any dtype and strides. Keeps its dtype, also under autocast.
        mask: bool tensor; True = overwrite. It and `input` are broadcast together.
        source: tensor of `input`'s dtype, of any shape, read in the order of its elements.

    Returns:
        A new tensor of `input`'s dtype, of the broadcast shape of `input` and `mask`.

    Raises:
        TypeError: an operand is not a tensor, `mask` is not bool, the dtypes of `input` and `source` differ.
        ValueError: `input` and `mask` do not broadcast, devices differ.

    Example:
        >>> mask = torch.tensor([True, False, True, True])
        >>> safeops.masked_scatter(torch.zeros(4), mask, torch.tensor([5.0, 6.0]))
        tensor([5., 0., 6., 0.])
    """
    return _masked_scatter.call(input, mask, source)

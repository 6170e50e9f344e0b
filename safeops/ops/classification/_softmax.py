"""Shared by masked_softmax and masked_log_softmax: definition, raw ops and record."""

import operator

import torch

from safeops.core import check
from safeops.core.definitions import keepdim_shape
from safeops.core.dtypes import WIDE, compute_dtype
from safeops.core.library import declare_raw
from safeops.core.op import Op

# ---- definition


def define(input, mask=None, dim=-1, log=False):
    x = input.to(compute_dtype(input.dtype))
    if mask is None:
        y = torch.log_softmax(x, dim) if log else torch.softmax(x, dim)
        return y.to(input.dtype)
    # Masked values become -inf. In a fully masked row they become 0: there -inf - -inf would be NaN.
    keep = mask.expand(input.shape)
    alive = keep.any(dim, keepdim=True)
    x = torch.where(keep, x, torch.where(alive, float("-inf"), 0.0))
    y = torch.log_softmax(x, dim) if log else torch.softmax(x, dim)
    return torch.where(keep, y, float("-inf") if log else 0.0).to(input.dtype)


def slope(grad, output, mask, dim):
    """The gradient of softmax from its output y and the upstream gradient g: dx = y (g - sum g y)."""
    compute = compute_dtype(output.dtype, grad.dtype)
    g, y = grad.to(compute), output.to(compute)
    if mask is not None:
        g = torch.where(mask, g, 0)
    dx = y * (g - (g * y).sum(dim, keepdim=True))
    return (dx if mask is None else torch.where(mask, dx, 0)).to(output.dtype)


def _row_numbers(input, mask, dim):
    """Returns (m, sum exp(x - m)) of each row, in fp64: m is the largest kept value, the sum is over kept values."""
    x = input.detach().double()
    keep = torch.ones((), dtype=torch.bool, device=x.device) if mask is None else mask
    x = torch.where(keep, x, float("-inf"))
    if x.dim() and x.shape[dim] == 0:
        shape = keepdim_shape(x.shape, dim)
        return x.new_full(shape, float("-inf")), x.new_zeros(shape)
    maximum = x.amax(dim, keepdim=True)
    alive = keep.expand(x.shape).any(dim, keepdim=True)
    total = torch.where(keep, (x - torch.where(alive, maximum, 0)).exp(), 0).sum(dim, keepdim=True)
    return maximum, total


def _composite(input, mask=None, dim=-1, log=False):
    return define(input, mask, dim, log), *_row_numbers(input, mask, dim)


# ---- op


def _fake(input, mask=None, dim=-1, log=False):
    row_stats = (input.new_empty(keepdim_shape(input.shape, dim), dtype=torch.float64) for _ in range(2))
    return torch.empty_like(input), *row_stats


def _fake_backward(grad, input, maximum, total, mask=None, dim=-1, log=False):
    return torch.empty_like(input)


def _fake_slope(grad, output, mask=None, dim=-1):
    return torch.empty_like(output)


_masked_softmax = declare_raw(
    "_masked_softmax",
    "(Tensor input, Tensor? mask=None, int dim=-1, bool log=False) -> (Tensor output, Tensor maximum, Tensor total)",
    fake=_fake,
    composite=_composite,
    triton="classification.masked_softmax.masked_softmax",
)
_masked_softmax_backward = declare_raw(
    "_masked_softmax_backward",
    "(Tensor grad, Tensor input, Tensor maximum, Tensor total, Tensor? mask=None, int dim=-1, bool log=False) "
    "-> Tensor",
    fake=_fake_backward,
    triton="classification.masked_softmax.masked_softmax_backward",
)
_masked_softmax_slope = declare_raw(
    "_masked_softmax_slope",
    "(Tensor grad, Tensor output, Tensor? mask=None, int dim=-1) -> Tensor",
    fake=_fake_slope,
    composite=slope,
)

# ---- record


class MaskedSoftmax(Op):
    """The record of a masked softmax (log=False) or log-softmax.

    On the CPU an exponential is slower than a read. So a softmax in fp32 or fp64 saves its output y, from which alone
    `slope` computes the gradient. Every other call saves its input and two numbers per row, and recomputes y.
    """

    shards = "softmax"

    def __init__(self, name, log):
        self.log = log
        super().__init__(name, _masked_softmax, _masked_softmax_backward, define)

    def prepare(self, input, mask, dim):
        if dim.__class__ is not int:
            self.validate(input, mask, dim)
            dim = operator.index(dim)
        return True, (input, mask, dim, True) if self.log else (input, mask, dim)

    def validate(self, input, mask, dim):
        check.floating(self.name, "input", input, numbers=True)
        check.mask(self.name, mask, "input", input)
        check.same_device(self.name, "input", input, mask=mask)
        check.one_dim(self.name, dim, input.dim())

    def validate_operands(self, input, mask, dim, log):
        self.validate(input, mask, dim)

    def keep(self, results, tensors):
        value, maximum, total = results
        if not self.log and value.is_cpu and value.dtype in WIDE:
            return None, None, value, *tensors[1:]
        return maximum, total, *tensors

    def gradients(self, grad, needs, operands, results):
        x, mask, dim, log = operands
        if results.maximum is None:  # x is the output
            return (_masked_softmax_slope(grad, x, mask, dim),)
        return (self.backward(grad, x, *results, mask, dim, log),)

    def composite_gradients(self, grad, needs, operands, results):
        if results.maximum is None:
            return (slope(grad, operands.input, operands.mask, operands.dim),)
        return super().composite_gradients(grad, needs, operands, results)

    def public(self):
        return super().public("(Tensor input, Tensor? mask=None, int dim=-1) -> Tensor", arguments=ARGUMENTS)


# The text that replaces {arguments} in both docstrings.
ARGUMENTS = """\
        input: floating tensor of any shape and strides.
        mask: bool tensor, broadcastable to `input`; True = keep. None keeps all.
        dim: the dim along which the kept values compete.

    Returns:
        A tensor of `input`'s shape, dtype and memory order.

    Raises:
        TypeError: `input` is not floating, `mask` is not bool, `dim` is not an int.
        ValueError: `mask` does not broadcast to `input`, devices differ.
        IndexError: dim out of range.
"""

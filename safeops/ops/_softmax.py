"""The skeleton of masked_softmax and masked_log_softmax: one definition, its raw ops, one call path.

An op of the family is `MaskedSoftmax(name, log)`.
"""

import operator

import torch

from safeops import _check, _route
from safeops._dtypes import compute_dtype
from safeops._library import Op, declare_public, declare_raw, document
from safeops.ops.normalize import thin_shape

# ---- definition


def define(log, input, mask, dim):
    x = input.to(compute_dtype(input.dtype))
    if mask is None:
        y = torch.log_softmax(x, dim) if log else torch.softmax(x, dim)
        return y.to(input.dtype)
    # A masked value has no part in its row; a row of nothing else would be -inf - -inf.
    keep = mask.expand(input.shape)
    alive = keep.any(dim, keepdim=True)
    x = torch.where(keep, x, torch.where(alive, float("-inf"), 0.0))
    y = torch.log_softmax(x, dim) if log else torch.softmax(x, dim)
    return torch.where(keep, y, float("-inf") if log else 0.0).to(input.dtype)


def slope(grad, output, mask, dim):
    """dx = y (g - sum g y), from y itself."""
    compute = compute_dtype(output.dtype, grad.dtype)
    g, y = grad.to(compute), output.to(compute)
    if mask is not None:
        g = torch.where(mask, g, 0)
    dx = y * (g - (g * y).sum(dim, keepdim=True))
    return (dx if mask is None else torch.where(mask, dx, 0)).to(output.dtype)


def _row_numbers(input, mask, dim):
    """(largest kept value, sum of exp(x - it)) of each row, in fp64."""
    x = input.detach().double()
    keep = torch.ones((), dtype=torch.bool, device=x.device) if mask is None else mask
    x = torch.where(keep, x, float("-inf"))
    if x.dim() and x.shape[dim] == 0:
        shape = thin_shape(x.shape, dim)
        return x.new_full(shape, float("-inf")), x.new_zeros(shape)
    top = x.amax(dim, keepdim=True)
    alive = keep.expand(x.shape).any(dim, keepdim=True)
    total = torch.where(keep, (x - torch.where(alive, top, 0)).exp(), 0).sum(dim, keepdim=True)
    return top, total


def _composite(input, mask=None, dim=-1, log=False):
    return define(log, input, mask, dim), *_row_numbers(input, mask, dim)


# ---- op


def _fake(input, mask=None, dim=-1, log=False):
    numbers = (input.new_empty(thin_shape(input.shape, dim), dtype=torch.float64) for _ in range(2))
    return torch.empty_like(input), *numbers


def _fake_backward(grad, input, top, total, mask=None, dim=-1, log=False):
    return torch.empty_like(input)


def _fake_slope(grad, output, mask=None, dim=-1):
    return torch.empty_like(output)


_masked_softmax = declare_raw(
    "_masked_softmax",
    "(Tensor input, Tensor? mask=None, int dim=-1, bool log=False) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    composite=_composite,
    triton="masked_softmax.masked_softmax",
)
_masked_softmax_backward = declare_raw(
    "_masked_softmax_backward",
    "(Tensor grad, Tensor input, Tensor top, Tensor total, Tensor? mask=None, int dim=-1, bool log=False) -> Tensor",
    fake=_fake_backward,
    triton="masked_softmax.masked_softmax_backward",
)
_masked_softmax_slope = declare_raw(
    "_masked_softmax_slope",
    "(Tensor grad, Tensor output, Tensor? mask=None, int dim=-1) -> Tensor",
    fake=_fake_slope,
    composite=slope,
)

# ---- autograd


def _function(log):
    def definition(input, mask, dim):
        return define(log, input, mask, dim)

    class _Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, mask=None, dim=-1, log=log):
            value, top, total = _masked_softmax(input, mask, dim, log)
            ctx.set_materialize_grads(False)
            ctx.dim = dim
            # On the CPU an exponential costs more than the memory's speed. A result that was not rounded is its own
            # derivative's only input, and is kept in place of ours. Else y is recomputed from two numbers a row.
            ctx.of_output = not log and input.device.type == "cpu" and value.dtype == compute_dtype(value.dtype)
            ctx.save_for_backward(*((value, mask) if ctx.of_output else (input, mask, top, total)))
            return value

        @staticmethod
        def backward(ctx, grad):
            nothing = (None,) * (len(ctx.needs_input_grad) - 1)
            if grad is None:
                return None, *nothing
            if ctx.of_output:
                by = slope if _route.by_composite(grad) else _masked_softmax_slope
                return by(grad, *ctx.saved_tensors, ctx.dim), *nothing
            input, mask, top, total = ctx.saved_tensors
            if _route.by_composite(grad):
                dx = _route.differentiable_backward(definition, (input, mask, ctx.dim), grad)[0]
            else:
                dx = _masked_softmax_backward(grad, input, top, total, mask, ctx.dim, log)
            return dx, *nothing

    return _Softmax


# ---- call path


class MaskedSoftmax:
    """A masked softmax: its op, and the call path of the public function."""

    def __init__(self, name, log):
        self.name, self.log = name, log
        raw = ("_masked_softmax", "_masked_softmax_backward")
        self.op = Op(name, raw, "Triton", _masked_softmax, _function(log))

    def call(self, input, mask, dim):
        try:
            kernel = _route.kernel(self.op, input, mask)
            if kernel is not None:
                if dim.__class__ is not int or kernel is self.op.traced:
                    self._validate(input, mask, dim)
                if input.requires_grad and torch.is_grad_enabled():
                    return kernel.apply(input, mask, dim)
                return kernel.raw(input, mask, dim, self.log)[0]
        except Exception:
            _check.explain(self._validate, input, mask, dim)
            raise
        self._validate(input, mask, dim)
        return define(self.log, input, mask, operator.index(dim))

    def _validate(self, input, mask, dim):
        _check.floating(self.name, "input", input)
        _check.mask(self.name, "mask", mask, "input", input.shape)
        _check.same_device(self.name, "input", input, mask=mask)
        _check.one_dim(self.name, dim, input.dim())


# What both docstrings say of their arguments, in place of {arguments}.
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


def declare_softmax(function):
    """Register a public softmax as `safeops::<op>`."""
    document(function, ARGUMENTS)
    declare_public(function, f"{function.__name__}(Tensor input, Tensor? mask=None, int dim=-1) -> Tensor")

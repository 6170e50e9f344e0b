"""masked_fill: fill where the mask is True; the value saturates to the dtype, gradients come back exactly 0 there."""

import torch

from safeops import _check, _route, _symbolic
from safeops._dtypes import (
    FLOATING,
    compute_dtype,
    fill_of,
    filled,
    overflows,
    readable,
    saturate,
    saturate_tensor,
    where,
)
from safeops._library import Op, declare_public, declare_raw, like
from safeops.ops.masked_sum import masked_sum, reduce_to

# ---- definition


def definition(input, fill_mask, value):
    if isinstance(value, torch.Tensor) and input.is_floating_point():
        # Filled wide and narrowed after: the gradient of the value is a sum, not to be taken in half.
        wide = value.to(compute_dtype(value.dtype, input.dtype))
        fill = saturate_tensor(wide, input.dtype)
        return torch.where(fill_mask, fill, input.to(wide.dtype)).to(input.dtype)
    return where(fill_mask, filled(input, (), fill_of(value, input.dtype)), input)


# ---- op


def _fake(input, fill_mask, number=0.0, value=None):
    return like(input, torch.broadcast_shapes(input.shape, fill_mask.shape), input.dtype)


def _composite(input, fill_mask, number=0.0, value=None):
    return definition(input, fill_mask, number if value is None else value)


# Its own backward: grad_input = masked_fill(grad, fill_mask, 0).
_masked_fill = declare_raw(
    "_masked_fill",
    "(Tensor input, Tensor fill_mask, float number=0.0, Tensor? value=None) -> Tensor",
    fake=_fake,
    composite=_composite,
)

# ---- autograd


class _MaskedFill(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, fill_mask, number, value=None):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(fill_mask)
        ctx.input_shape = input.shape
        ctx.value = None if value is None else (value.dtype, value.shape)
        # A finite value that saturated has gradient 0 (contract, clause 3); only a wider value can.
        ctx.value_limit = None
        if value is not None and value.requires_grad and value.dtype != input.dtype:
            ctx.save_for_backward(fill_mask, value)
            ctx.value_limit = input.dtype
        return _masked_fill(input, fill_mask, number, value)

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        fill_mask = ctx.saved_tensors[0]
        grad_input = grad_value = None
        shape, wide = ctx.input_shape, compute_dtype(grad.dtype, *(ctx.value or ())[:1])
        composite = _route.by_composite(grad)
        if ctx.needs_input_grad[0]:
            if composite:
                grad_input = torch.where(fill_mask, 0, grad).sum_to_size(shape)
            else:
                grad_input = reduce_to(_masked_fill(grad, fill_mask), shape, grad.dtype)
        if ctx.value is not None and ctx.needs_input_grad[3]:
            dtype, shape = ctx.value
            # d(out)/d(value) = 1 on the filled positions
            if composite:
                grad_value = torch.where(fill_mask, grad, 0).to(wide).sum()
            else:
                grad_value = masked_sum(grad, fill_mask.expand(grad.shape), dtype=wide)
            grad_value = grad_value.to(dtype).reshape(shape)
            if ctx.value_limit is not None:
                value = ctx.saved_tensors[1]
                over = overflows(value, ctx.value_limit) & value.isfinite()
                grad_value = torch.where(over, 0, grad_value)
        return (grad_input, None, None, grad_value)[: len(ctx.needs_input_grad)]


OP = Op("masked_fill", ("_masked_fill",), "C++/CUDA", _masked_fill, _MaskedFill, definition)

# ---- public function


def masked_fill(input, fill_mask, value):
    """Return `input` with `value` where `fill_mask` is True.

    As `torch.Tensor.masked_fill`, except that a finite value too large for the dtype saturates (`-1e9` in fp16 is
    -65504, where torch raises) and that nothing leaks through the backward: the gradient to `input` is exactly 0 at
    filled positions, even where the upstream gradient is NaN.

    Args:
        input: tensor of any shape. Keeps its dtype, also under autocast. fp16, bf16, fp32 and fp64 take the kernel.
        fill_mask: bool tensor, broadcastable with `input`; True = fill.
        value: number or 0-dim tensor (differentiable). inf and nan are written as they are. Among integers inf
            saturates, and a tensor that is nan writes 0: to refuse it, as a number is, would be to wait for it.

    Returns:
        A new tensor of `input`'s dtype, of the broadcast shape of `input` and `fill_mask`.

    Raises:
        TypeError: `input` or `fill_mask` is no tensor, `fill_mask` is not bool, `value` is neither number nor tensor.
        ValueError: shapes do not broadcast, devices differ, `value` has dimensions, or is nan for integers.

    Example:
        >>> scores = torch.zeros(3, dtype=torch.float16)
        >>> safeops.masked_fill(scores, torch.tensor([True, False, True]), -1e9)
        tensor([-65504.,      0., -65504.], dtype=torch.float16)
    """
    number, scalar = value, None
    try:
        if isinstance(value, torch.Tensor):
            number, scalar = 0.0, value.double() if value.dtype == torch.bool else readable(value)
        elif value.__class__ is int and abs(value) > 1e308:
            number = saturate(value, torch.float64)
        kernel = None
        if input.dtype in FLOATING and (scalar is None or scalar.dim() == 0):
            kernel = _route.kernel(OP, input, fill_mask, scalar)
        if kernel is not None:
            if kernel is OP.traced:
                _validate(input, fill_mask, value)
                if scalar is None and _symbolic.symbolic(number):
                    number, scalar = 0.0, _symbolic.scalar(number, torch.float64, input.device)
            arguments = (input, fill_mask, number) if scalar is None else (input, fill_mask, number, scalar)
            if torch.is_grad_enabled() and (input.requires_grad or (scalar is not None and scalar.requires_grad)):
                return kernel.apply(*arguments)
            return kernel.raw(*arguments)
    except Exception:
        _check.explain(_validate, input, fill_mask, value)
        raise
    _validate(input, fill_mask, value)
    return OP.composite(input, fill_mask, value)


def _validate(input, fill_mask, value):
    _check.real("masked_fill", "input", input)
    _check.boolean("masked_fill", "fill_mask", fill_mask, "True = fill")
    _check.broadcast("masked_fill", fill_mask=fill_mask, input=input)
    if isinstance(value, torch.Tensor):
        _check.real_scalar("masked_fill", "value", value)
    elif not isinstance(value, _check.NUMBER):
        raise TypeError(f"masked_fill: value must be a number or a 0-dim tensor, got {type(value).__name__}")
    else:
        _check.exists("masked_fill", "value", value, input.dtype)
    _check.same_device("masked_fill", "input", input, fill_mask=fill_mask, value=value)


declare_public(
    masked_fill,
    "masked_fill(Tensor input, Tensor fill_mask, Scalar value) -> Tensor",
    "masked_fill.Tensor(Tensor input, Tensor fill_mask, Tensor value) -> Tensor",
)

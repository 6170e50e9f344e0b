"""safe_div: input / other with a stand-in where the divisor vanishes, saturation where the quotient does not fit."""

import torch

from safeops import _check, _route
from safeops._dtypes import FLOATING, HALF, compute_dtype, largest_like, saturate
from safeops._library import Op, declare_public, declare_raw, like
from safeops.ops.masked_sum import reduce_to

# ---- definition


def definition(input, other, eps=None, fill_value=0.0, dtype=None):
    if dtype is None:
        dtype = _promoted(input, other)
    compute = compute_dtype(input.dtype, other.dtype, dtype)
    if eps is None:
        eps = torch.finfo(compute).tiny
    a, b = input.to(compute), other.to(compute)
    keep = ~((b.abs() < eps) | (b == 0))  # a NaN divisor is kept, and shows
    with torch.no_grad():
        q = torch.where(keep, a, 0) / torch.where(keep, b, 1)
        over = q.to(dtype).isinf() & a.isfinite()
        stand_in = torch.where(keep, largest_like(q, dtype), saturate(fill_value, dtype))
    true = keep & ~over
    # Select before dividing: neither stand-in region may see the other's arithmetic, forward or backward.
    a, b = torch.where(true, a, 0), torch.where(true, b, 1)
    with torch.no_grad():
        # A power of two that brings b near 1: the backward divides by b twice, and a / b^2 may overflow where g a / b^2
        # does not, or where g is 0.
        limits = torch.finfo(compute).tiny, 1 / torch.finfo(compute).tiny
        scale = torch.where(b.isfinite(), (torch.frexp(b)[0] / b).clamp(*limits), 1)
    quotient = (a * scale) / (b * scale)
    return torch.where(true, quotient.to(dtype), stand_in.to(dtype))


# ---- op


def _fake(input, other, eps=None, fill_value=0.0, dtype=None):
    return like(input, torch.broadcast_shapes(input.shape, other.shape), dtype or input.dtype)


def _fake_backward(grad, input, other, eps=None, need_input=True, need_other=True, input_dtype=None, other_dtype=None):
    shape = torch.broadcast_shapes(input.shape, other.shape)
    input_dtype, other_dtype = input_dtype or input.dtype, other_dtype or other.dtype
    return (
        like(input, shape, input_dtype) if need_input else input.new_empty(0, dtype=input_dtype),
        like(other, shape, other_dtype) if need_other else input.new_empty(0, dtype=other_dtype),
    )


_safe_div = declare_raw(
    "_safe_div",
    "(Tensor input, Tensor other, float? eps=None, float fill_value=0.0, ScalarType? dtype=None) -> Tensor",
    fake=_fake,
    composite=definition,
)
_safe_div_backward = declare_raw(
    "_safe_div_backward",
    "(Tensor grad, Tensor input, Tensor other, float? eps=None, bool need_input=True, bool need_other=True, "
    "ScalarType? input_dtype=None, ScalarType? other_dtype=None) -> (Tensor, Tensor)",
    fake=_fake_backward,
)

# ---- autograd


class _SafeDiv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, other, eps=None, fill_value=0.0, dtype=None):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, other)
        ctx.arguments = (eps, fill_value, dtype)
        return _safe_div(input, other, eps, fill_value, dtype)

    @staticmethod
    def backward(ctx, grad):
        nothing = (None,) * (len(ctx.needs_input_grad) - 2)
        if grad is None:
            return None, None, *nothing
        input, other = ctx.saved_tensors
        if _route.by_composite(grad):
            grads = _route.differentiable_backward(definition, (input, other, *ctx.arguments), grad)
            return grads[0], grads[1], *nothing
        need_input, need_other = ctx.needs_input_grad[:2]
        # A broadcast operand's gradient is summed: nothing is rounded to half before that sum.
        wide = compute_dtype(input.dtype, other.dtype, grad.dtype)
        da, db = _safe_div_backward(
            grad,
            input,
            other,
            ctx.arguments[0],
            need_input,
            need_other,
            None if input.shape == grad.shape else wide,
            None if other.shape == grad.shape else wide,
        )
        return (
            reduce_to(da, input.shape, input.dtype) if need_input else None,
            reduce_to(db, other.shape, other.dtype) if need_other else None,
            *nothing,
        )


OP = Op("safe_div", ("_safe_div", "_safe_div_backward"), "C++/CUDA", _safe_div, _SafeDiv)

# ---- public function


def safe_div(input, other, *, eps=None, fill_value=0.0, dtype=None):
    """`input / other`, finite for finite input; no NaN or inf gradient comes from a division that has no value.

    Where `|other| < eps` or `other == 0` the position counts as masked out: the result is `fill_value`, whatever
    `input` holds there, and both gradients are 0. A quotient that does not fit the output dtype saturates at its
    largest finite value, with gradient 0. A NaN divisor, and a NaN or inf numerator over a kept divisor, show in
    the result. Half operands are divided in fp32 and rounded once. A true gradient that overflows its dtype (that of
    a divisor of 1e-3 in fp16, say) becomes inf, which is what GradScaler looks for; `eps` says where it stops to count.

    Args:
        input: floating (or integer) tensor.
        other: tensor broadcastable with `input`, or a number.
        eps: smallest divisor magnitude that counts, at least 0; a floor, never added. None: the smallest normal number
            of the compute dtype (1.2e-38 in fp32, which half inputs use; 2.2e-308 in fp64).
        fill_value: the stand-in; a finite one saturates to the dtype.
        dtype: output dtype. None: the promoted input dtype, at least fp32 under autocast.

    Returns:
        A tensor of the broadcast shape of `input` and `other`.

    Raises:
        TypeError: an operand is no (real) tensor, eps or fill_value no number, dtype not floating.
        ValueError: shapes do not broadcast, devices differ, eps is negative.

    Example:
        >>> safeops.safe_div(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 4.0]))
        tensor([0.0000, 0.2500])
    """
    try:
        floating = input.dtype in FLOATING
        if floating and isinstance(other, (float, int)):
            dtype = dtype or _output_dtype(input, input.dtype)
            other = _divisor(other, input, dtype)
        kernel = _route.kernel(OP, input, other) if floating and other.dtype in FLOATING else None
        if kernel is not None:
            if eps is not None or fill_value.__class__ is not float or kernel is OP.traced:
                _validate(input, other, eps, fill_value, dtype)
            if dtype is None:
                promoted = input.dtype if input.dtype == other.dtype else _promoted(input, other)
                dtype = _output_dtype(input, promoted)
            arguments = (input, other)
            if eps is not None or fill_value != 0 or dtype != input.dtype or dtype != other.dtype:
                arguments = (input, other, eps, fill_value, dtype)
            if torch.is_grad_enabled() and (input.requires_grad or other.requires_grad):
                return kernel.apply(*arguments)
            return kernel.raw(*arguments)
    except Exception:
        _validate(input, other, eps, fill_value, dtype)
        raise
    _validate(input, other, eps, fill_value, dtype)
    if dtype is None:
        dtype = _output_dtype(input, _promoted(input, other))
    if not isinstance(other, torch.Tensor):
        other = _divisor(other, input, dtype)
    return definition(input, other, eps, fill_value, dtype)


def _divisor(number, input, dtype):
    """A number as a tensor of the compute dtype: 1e-8 must not become 0 on its way through half."""
    compute = compute_dtype(input.dtype, dtype)
    return torch.full((), saturate(number, compute), dtype=compute, device=input.device)


def _promoted(input, other):
    """torch.result_type of a true division; that function itself cannot be traced."""
    floats = [x for x in (input, other) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not floats:
        return torch.get_default_dtype()
    if len(floats) == 2 and (input.dim() == 0) != (other.dim() == 0):
        return (other if input.dim() == 0 else input).dtype  # a 0-dim tensor does not widen one with dimensions
    return torch.promote_types(floats[0].dtype, floats[-1].dtype)


def _output_dtype(input, promoted):
    device = input.device.type
    if promoted in HALF and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.float32  # as torch's own autocast does for log, exp and pow
    return promoted


def _check_numbers(eps, fill_value):
    if eps is not None:
        _check.number("safe_div", "eps", eps, minimum=0)
    _check.number("safe_div", "fill_value", fill_value)


def _validate(input, other, eps, fill_value, dtype):
    _check.tensor("safe_div", "input", input)
    if not isinstance(other, (int, float)):
        _check.tensor("safe_div", "other", other)
        _check.broadcast("safe_div", input=input, other=other)
        _check.same_device("safe_div", "input", input, other=other)
    for name, x in (("input", input), ("other", other)):
        if isinstance(x, torch.Tensor):
            _check.real("safe_div", name, x)
    _check_numbers(eps, fill_value)
    _check.output_dtype("safe_div", dtype)


_KEYWORDS = "*, float? eps=None, float fill_value=0.0, ScalarType? dtype=None"
declare_public(
    safe_div,
    f"safe_div(Tensor input, Tensor other, {_KEYWORDS}) -> Tensor",
    f"safe_div.Scalar(Tensor input, Scalar other, {_KEYWORDS}) -> Tensor",
)

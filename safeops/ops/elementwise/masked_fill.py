"""masked_fill: fill where the mask is True, with a value that saturates to the dtype; the gradient there is 0."""

import torch

from safeops.core import check
from safeops.core.dtypes import (
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
from safeops.core.foreign import REQUIRED, refuse, require
from safeops.core.library import declare_raw, like
from safeops.core.op import Op
from safeops.core.sums import sum_to, total

# ---- definition


def definition(input, fill_mask, value=None, number=0.0):
    """input, with a fill value where fill_mask is True: `value`, a 0-dim tensor; if that is None, `number`."""
    if value is not None and input.is_floating_point():
        # Fill in fp32 or fp64 and round afterwards: the gradient of `value` is a sum, which must not be summed in half.
        wide = value.to(compute_dtype(value.dtype, input.dtype))
        fill = saturate_tensor(wide, input.dtype)
        return torch.where(fill_mask, fill, input.to(wide.dtype)).to(input.dtype)
    fill = fill_of(number if value is None else value, input.dtype)
    return where(fill_mask, filled(input, (), fill), input)


# ---- op


def _fake(input, fill_mask, value=None, number=0.0):
    return like(input, torch.broadcast_shapes(input.shape, fill_mask.shape), input.dtype)


# The forward op is also the backward: grad_input = masked_fill(grad, fill_mask, 0).
_forward = declare_raw(
    "_masked_fill",
    "(Tensor input, Tensor fill_mask, Tensor? value=None, float number=0.0) -> Tensor",
    fake=_fake,
    composite=definition,
)

# ---- record


class MaskedFill(Op):
    owner = "C++/CUDA"
    shards = "elementwise"
    differentiable = ("input", "value")
    sum_to = staticmethod(sum_to)
    linear = 1

    def prepare(self, input, fill_mask, value):
        takes = input.dtype in FLOATING
        if isinstance(value, torch.Tensor):
            value = value.double() if value.dtype == torch.bool else readable(value)
            return takes and value.dim() == 0, (input, fill_mask, value)
        if value.__class__ is int and takes and abs(value) > 1e308:
            value = saturate(value, torch.float64)
        return takes, (input, fill_mask, None, value)

    def validate(self, input, fill_mask, value):
        require("masked_fill", fill_mask=fill_mask, value=value)
        check.real("masked_fill", "input", input)
        check.boolean("masked_fill", "fill_mask", fill_mask, "True = fill")
        check.broadcast("masked_fill", fill_mask=fill_mask, input=input)
        if isinstance(value, torch.Tensor):
            check.real_scalar("masked_fill", "value", value)
        elif not isinstance(value, check.NUMBER):
            raise TypeError(f"masked_fill: value must be a number or a 0-dim tensor, got {type(value).__name__}")
        else:
            check.exists("masked_fill", "value", value, input.dtype)
        check.same_device("masked_fill", "input", input, fill_mask=fill_mask, value=value)

    def keep(self, results, tensors):
        """Save `value` only if it requires a gradient: else backward does not read it, and the caller may change it."""
        value = tensors[-1]  # None, or the mask, if the value is a number
        return tensors if value is not None and value.requires_grad else tensors[:1]

    def gradients(self, grad, needs, operands, results):
        input, fill_mask, value, _ = operands
        d_input = self.forward(grad, fill_mask) if needs[0] else None
        if value is None or not needs[2]:
            return d_input, None
        # d(out)/d(value) = 1 on the filled positions
        d_value = total(grad, fill_mask, dtype=compute_dtype(grad.dtype, value.dtype))
        # A finite value that saturated has gradient 0. (Only a value of a wider dtype than input's can saturate.)
        over = overflows(value, input.dtype) & value.isfinite()
        return d_input, torch.where(over, 0, d_value).to(value.dtype)


_masked_fill = MaskedFill("masked_fill", _forward, definition=definition)

# ---- public function


@_masked_fill.public(
    "(Tensor input, Tensor fill_mask, Scalar value) -> Tensor",
    ".Tensor(Tensor input, Tensor fill_mask, Tensor value) -> Tensor",
)
def masked_fill(input, fill_mask=REQUIRED, value=REQUIRED, *extra, **unknown):
    """Return `input` with `value` where `fill_mask` is True.

    As `torch.Tensor.masked_fill`, except that a finite value too large for the dtype saturates (`-1e9` in fp16 is
    -65504, where torch raises) and that nothing leaks through the backward: the gradient to `input` is exactly 0 at
    filled positions, even where the upstream gradient is NaN.

    Args:
        input: tensor of any shape. Keeps its dtype, also under autocast. fp16, bf16, fp32 and fp64 take the kernel.
        fill_mask: bool tensor, broadcastable with `input`; True = fill.
        value: number or 0-dim tensor (differentiable). inf and nan are written as they are. In an integer `input` inf
            saturates; nan raises as a number, and writes 0 as a tensor, whose value the host does not wait for.

    Returns:
        A new tensor of `input`'s dtype, of the broadcast shape of `input` and `fill_mask`.

    Raises:
        TypeError: `input` or `fill_mask` is not a tensor, `fill_mask` is not bool, `value` is not a number or tensor.
        ValueError: shapes do not broadcast, devices differ, `value` has dimensions, or is nan for integers.

    Example:
        >>> scores = torch.zeros(3, dtype=torch.float16)
        >>> safeops.masked_fill(scores, torch.tensor([True, False, True]), -1e9)
        tensor([-65504.,      0., -65504.], dtype=torch.float16)
    """
    if extra or unknown:
        refuse(masked_fill, extra, unknown)
    return _masked_fill.call(input, fill_mask, value)

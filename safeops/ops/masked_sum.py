"""masked_sum: the sum of the kept elements."""

import torch

from safeops.ops._reduction import MaskedReduction, declare_reduction

_masked_sum = MaskedReduction("masked_sum", mean=False)


def masked_sum(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    """Sum of `weight * input` over the kept elements: `mask` True and `weight` not 0.

    Masked-out elements do not exist: NaN, inf or garbage there changes neither the result nor a gradient, and their own
    gradient is exactly 0. Half is accumulated in fp32 and returned in fp32.

    Args:
        {arguments}

    Example:
        >>> x = torch.tensor([[1.0, torch.nan], [2.0, 3.0]])
        >>> safeops.masked_sum(x, x.isfinite(), dim=1)
        tensor([1., 5.])
    """
    return _masked_sum.call(input, mask, dim, keepdim, weight, dtype, empty)


declare_reduction(masked_sum)


def reduce_to(grad, shape, dtype):
    """A gradient of the full broadcast shape, summed to its operand's shape and narrowed once, at the end."""
    if grad.shape == shape:
        return grad
    lead = grad.dim() - len(shape)
    dims = [d for d in range(grad.dim()) if d < lead or shape[d - lead] != grad.shape[d]]
    if grad.is_complex():
        return torch.complex(*(reduce_to(part, shape, part.dtype) for part in (grad.real, grad.imag)))
    # ours, not sum_to_size: aten's CPU sum depends on the number of threads
    return masked_sum(grad, dim=dims, keepdim=True, dtype=dtype).reshape(shape)

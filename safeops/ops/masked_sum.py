"""masked_sum: the sum of the kept elements."""

from safeops.ops._reduction import MaskedReduction, declare_reduction

_masked_sum = MaskedReduction("masked_sum", mean=False)


def masked_sum(input, mask=None, dim=None, *, keepdim=False, weight=None, dtype=None, empty="zero"):
    """Sum of `weight * input` over the kept elements: `mask` True and `weight` not 0.

    Masked-out elements do not exist: NaN, inf or garbage there changes neither the result nor a gradient, and their own
    gradient is exactly 0. Half is accumulated in fp32 and returned in fp32.

    Args:
        input: floating tensor of any shape and strides.
        mask: bool tensor, broadcastable to `input`; True = keep. None keeps all.
        dim: int or tuple of ints; None (or an empty tuple) reduces all dims.
        keepdim: keep the reduced dims with size 1.
        weight: floating tensor, broadcastable to `input`; 0 means the same as masked out.
        dtype: output dtype. None: fp32 for fp16, bf16 and fp32 input, fp64 for fp64.
        empty: where nothing is kept: "zero" gives 0 (attached to the graph, zero gradients), "nan" gives NaN, "raise"
            raises ValueError before any work (and synchronises to know).

    Returns:
        The sums, of `input`'s shape without the reduced dims.

    Raises:
        TypeError: `input` or `weight` is not floating, `mask` is not bool, dtype is not floating.
        ValueError: `mask` or `weight` does not broadcast to `input`, devices differ, dim repeats, unknown `empty`.
        IndexError: dim out of range.

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
    # ours, not sum_to_size: aten's CPU sum depends on the number of threads
    return masked_sum(grad, dim=dims, keepdim=True, dtype=dtype).reshape(shape)

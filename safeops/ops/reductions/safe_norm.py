"""safe_norm: masked_norm that saturates; `dim` is its second argument, and it takes no weight."""

import torch

from safeops.core.foreign import refuse
from safeops.ops.reductions.masked_norm import KINDS, Norm, norm


def _define(k, ord):
    value, origin, scale = norm(k, ord, safe=True)
    most = torch.finfo(k.dtype).max
    overflows = (value > most) & (value.isfinite() | k.largest(k.x.abs()).isfinite())
    return torch.where(overflows, most, value), origin, torch.where(overflows, 0, scale)


_safe_norm = Norm("safe_norm", _define, KINDS, "ord", "masked_norm")


@_safe_norm.public(
    "(Tensor input, int[1]? dim=None, *, Scalar ord=2, bool keepdim=False, Tensor? mask=None, "
    "ScalarType? dtype=None) -> Tensor",
)
def safe_norm(input, dim=None, *extra, ord=2, keepdim=False, mask=None, dtype=None, **unknown):
    """The vector norm (sum |input|^ord)^(1 / ord), with gradient 0 at a vector of zeros.

    It replaces `x.norm(dim=-1)` and `(x**2).sum(-1).sqrt()`, whose gradient at 0 is NaN and whose squares overflow
    (256^2 is inf in fp16). Half is computed in fp32 and returned in fp32. In no dtype does a square overflow or
    underflow where the norm does not. A norm of finite elements that does not fit the output dtype saturates at its
    largest number, with gradient 0.

    Args:
        input: floating tensor of any shape and strides.
        dim: int or tuple of ints; None (or an empty tuple) reduces all dims.
        ord: any number, as in `torch.linalg.vector_norm`: inf is the largest magnitude, -inf the smallest, 0 counts the
            elements that are not 0. Orders other than 1, 2, inf and -inf run as plain torch operations, without kernel.
        keepdim: keep the reduced dims with size 1.
        mask: bool tensor, broadcastable to `input`; True = keep. The norm of nothing is 0.
        dtype: output dtype. None: fp32 for fp16, bf16 and fp32 input, fp64 for fp64.

    Returns:
        The norms, of `input`'s shape without the reduced dims.

    Raises:
        TypeError: `input` is not floating, `mask` is not bool, `ord` is not a number, dtype is not floating.
        ValueError: `mask` does not broadcast to `input`, devices differ, dim repeats.
        IndexError: dim out of range.

    Example:
        >>> x = torch.tensor([[300.0, 400.0], [0.0, 0.0]], dtype=torch.float16, requires_grad=True)
        >>> norm = safeops.safe_norm(x, dim=-1)
        >>> norm.detach()
        tensor([500.,   0.])
        >>> torch.autograd.grad(norm.sum(), x)[0][1]
        tensor([0., 0.], dtype=torch.float16)
    """
    if extra or unknown:
        refuse(safe_norm, extra, unknown)
    return _safe_norm.call(input, mask, dim, keepdim, None, dtype, "zero", ord)

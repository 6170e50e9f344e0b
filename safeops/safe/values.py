"""Handlers: torch's arguments -> the twin's result, or None where torch's function is to be called."""

import math

import torch

from safeops.core.dtypes import HALF
from safeops.ops.elementwise.apply_where import apply_where
from safeops.ops.elementwise.masked_fill import masked_fill
from safeops.ops.reductions.masked_mean import masked_mean
from safeops.ops.reductions.masked_sum import masked_sum
from safeops.ops.reductions.safe_norm import safe_norm
from safeops.ops.rows.cosine_similarity import cosine_similarity
from safeops.ops.rows.masked_log_softmax import masked_log_softmax
from safeops.ops.rows.masked_softmax import masked_softmax
from safeops.ops.rows.normalize import normalize
from safeops.safe.origins import Division, Product, Read, origin

# ---- rows


def softmax(input, dim=None, dtype=None, _stacklevel=3):
    return _over_rows(masked_softmax, input, dim, dtype)


def log_softmax(input, dim=None, dtype=None, _stacklevel=3):
    return _over_rows(masked_log_softmax, input, dim, dtype)


def _over_rows(twin, input, dim, dtype):
    """A row of -inf is hidden whole; in any other, -inf is as good as masked out."""
    x = input if dtype is None else input.to(dtype)
    if dim is None or not x.is_floating_point():
        return None
    x = _autocast(x)
    return twin(x, x != float("-inf"), dim)


def _autocast(x):
    """Half as torch's functions of rows take it under autocast: on a GPU as fp32."""
    casts = x.dtype in HALF and x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type)
    return x.float() if casts else x


def unit_rows(input, p=2.0, dim=1, eps=1e-12, out=None):
    return normalize(_autocast(input), p, dim, eps) if out is None else None


def cosine(x1, x2, dim=1, eps=1e-8):
    x1, x2 = _autocast(x1), _autocast(x2)
    # The result is at most 1, which half holds, and weights in half may wait for it.
    return cosine_similarity(x1, x2, dim=dim, eps=eps).to(torch.promote_types(x1.dtype, x2.dtype))


# ---- fills and divisions


def fill(input, mask, value):
    return masked_fill(input, mask, value) if _overflows(input, value) else None


def fill_(input, mask, value):
    if not _overflows(input, value):
        return None
    return input.masked_fill_(mask, math.copysign(torch.finfo(input.dtype).max, value))


def _overflows(x, value):
    finite_number = isinstance(value, (int, float)) and math.isfinite(value)
    return finite_number and x.is_floating_point() and abs(value) > torch.finfo(x.dtype).max


def where(condition, input=None, other=None):
    if torch.compiler.is_compiling() or input is None or other is None:
        return None
    for quotient, rest in ((input, other), (other, input)):
        division = origin(quotient, Division)
        if division is not None:
            kept = condition if quotient is input else ~condition
            a, b = (x.to(quotient.dtype) if isinstance(x, torch.Tensor) else quotient.new_full((), x) for x in division)
            return apply_where(kept, (a, b), torch.div, fill_value=rest)
    return None


def method_where(input, condition, other):
    return where(condition, input, other)


# ---- sums and norms


def sum(input, dim=None, keepdim=False):
    operands = _operands(input, dim, keepdim)
    return operands and masked_sum(*operands, keepdim=keepdim, dtype=_dtype(input, dim))


def mean(input, dim=None, keepdim=False):
    operands = _operands(input, dim, keepdim)
    if operands is None or operands[0] is input or origin(input, Product) is None:
        return operands and masked_mean(*operands, keepdim=keepdim, dtype=_dtype(input, dim))
    total = masked_sum(*operands, keepdim=keepdim)  # elements that the mask makes 0 count
    return (total / (input.numel() // total.numel())).to(_dtype(input, dim) or total.dtype)


def _operands(x, dim, keepdim):
    """(tensor, mask, dim) of the twin's call: of what x was made from, or of x where that is half."""
    if not torch.compiler.is_compiling():
        product = origin(x, Product)
        if product is not None and x.numel():
            return product.input.expand(product.shape), product.mask, dim
        read = None if keepdim or not _is_whole(x, dim) else origin(x, Read)
        if read is not None:
            missing = read.input.dim() - read.mask.dim()
            return read.input, read.mask[(...,) + (None,) * missing], None
    return (x, None, dim) if _is_wide(x, dim) else None


def _is_wide(x, dim):
    """True if a reduction of x is to be fp32: half ones are, but outside autocast a row of results may meet half
    weights, which take nothing else; a single number changes no other tensor's dtype."""
    return x.dtype in HALF and (_is_whole(x, dim) or torch.is_autocast_enabled(x.device.type))


def _is_whole(x, dim):
    """True if a reduction over `dim` leaves one number."""
    return dim is None or x.dim() <= 1


def _dtype(x, dim):
    """That of the result, None for the twin's own."""
    return x.dtype if x.dtype in HALF and not _is_wide(x, dim) else None


def norm(input, p="fro", dim=None, keepdim=False, dtype=None, out=None):
    order = 2 if p == "fro" or p is None else p
    if isinstance(order, str) or dtype is not None or out is not None or not _is_wide(input, dim):
        return None
    return safe_norm(input, dim, ord=order, keepdim=keepdim)


def vector_norm(x, ord=2, dim=None, keepdim=False):
    return safe_norm(x, dim, ord=ord, keepdim=keepdim) if _is_wide(x, dim) else None


def linalg_norm(A, ord=None, dim=None, keepdim=False):
    vectors = ord is None or A.dim() == 1 or isinstance(dim, int)  # else a matrix norm
    return vector_norm(A, 2 if ord is None else ord, dim, keepdim) if vectors else None

"""Handlers: take a torch function's arguments; return the twin's result, or None to call torch's function."""

import math

import torch

from safeops.core.dtypes import HALF
from safeops.ops.classification.masked_log_softmax import masked_log_softmax
from safeops.ops.classification.masked_softmax import masked_softmax
from safeops.ops.elementwise.masked_fill import masked_fill
from safeops.ops.reductions.masked_mean import masked_mean
from safeops.ops.reductions.masked_sum import masked_sum
from safeops.ops.reductions.safe_norm import safe_norm
from safeops.ops.vectors.cosine_similarity import cosine_similarity
from safeops.ops.vectors.normalize import normalize
from safeops.safe import gradients, origins, quotients
from safeops.safe.readable import is_readable

# ---- rows


def softmax(input, dim=None, dtype=None, _stacklevel=3):
    return _over_rows(masked_softmax, input, dim, dtype)


def log_softmax(input, dim=None, dtype=None, _stacklevel=3):
    return _over_rows(masked_log_softmax, input, dim, dtype)


def _over_rows(twin, input, dim, dtype):
    """Call the twin with the mask x != -inf: a row of -inf alone is then hidden whole; in other rows -inf equals
    masked. None if no row is all -inf: then torch's own result is right, and torch saves its result for backward, where
    the twin may save the input. Only CPU tensors are checked for this, since a GPU would be waited for."""
    x = input if dtype is None else input.to(dtype)
    if dim is None or not x.is_floating_point():
        return None
    if is_readable(x) and x.numel() and not (x.detach().amax(dim) == float("-inf")).any():
        return None
    x = _autocast(x)
    return twin(x, x != float("-inf"), dim)


def _autocast(x):
    """x as torch's row functions take it under autocast: on a GPU, half becomes fp32."""
    casts = x.dtype in HALF and x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type)
    return x.float() if casts else x


def unit_rows(input, p=2.0, dim=1, eps=1e-12, out=None):
    return normalize(_autocast(input), p, dim, eps) if out is None else None


def cosine(x1, x2, dim=1, eps=1e-8):
    x1, x2 = _autocast(x1), _autocast(x2)
    # In the operands' dtype: a cosine fits in half, and may meet half weights.
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
    if torch.compiler.is_compiling() or origins.are_off() or not torch.is_grad_enabled():
        return None
    tensors = [x for x in (input, other) if isinstance(x, torch.Tensor)]
    return torch.where(condition, input, other) if any([quotients.mend(x) for x in tensors]) else None


def method_where(input, condition, other):
    return where(condition, input, other)


# ---- sums and norms


def sum(input, dim=None, keepdim=False):
    mask = _mask_of_product(input)
    if mask is None and not _is_wide(input, dim):
        return None
    return masked_sum(input, _kept("sum", input, mask), dim, keepdim=keepdim, dtype=_dtype(input, dim))


def mean(input, dim=None, keepdim=False):
    mask = _mask_of_product(input)
    if mask is not None and input.numel():
        total = masked_sum(input, _kept("mean", input, mask), dim, keepdim=keepdim)  # hidden elements count, as 0
        return (total / (input.numel() // total.numel())).to(_dtype(input, dim) or total.dtype)
    if _is_wide(input, dim) or not (torch.compiler.is_compiling() or input.numel()):  # the mean of nothing is 0
        return masked_mean(input, None, dim, keepdim=keepdim, dtype=_dtype(input, dim))
    return None


def _mask_of_product(x):
    """The mask that x is a product with, if it may hide NaN. None if x holds no NaN: then torch's own sum is right.
    Values are read on the CPU alone."""
    mask = None if torch.compiler.is_compiling() else origins.mask_of_product(x)
    nothing_hidden = mask is not None and is_readable(x) and not x.detach().sum().isnan()
    return None if nothing_hidden else mask


def _kept(function, product, mask):
    """Bool: True for the elements of a product with a mask that are summed: all except NaN where the mask is 0. So a
    product without NaN has its own sum, even if it was written to, and each element has its gradient."""
    if mask is None:
        return None
    kept = mask | (product == product)
    gradients.watch(function, product, kept)
    return kept


def _is_wide(x, dim):
    """True if a reduction of x becomes fp32: x is fp16, and the result is one number, which changes no other tensor's
    dtype. Several results stay fp16: they may meet half weights, which take no other dtype. bf16 stays: it has fp32's
    range, with fewer digits."""
    return x.dtype == torch.float16 and (dim is None or x.dim() <= 1)


def _dtype(x, dim):
    """The dtype to ask the twin for; None: the twin's own."""
    return x.dtype if x.dtype in HALF and not _is_wide(x, dim) else None


def norm(input, p="fro", dim=None, keepdim=False, dtype=None, out=None):
    order = 2 if p == "fro" or p is None else p
    return (
        None
        if isinstance(order, str) or dtype is not None or out is not None
        else vector_norm(input, order, dim, keepdim)
    )


def vector_norm(x, ord=2, dim=None, keepdim=False):
    return safe_norm(x, dim, ord=ord, keepdim=keepdim) if ord and _is_wide(x, dim) else None  # order 0 is a count


def linalg_norm(A, ord=None, dim=None, keepdim=False):
    vectors = ord is None or A.dim() == 1 or isinstance(dim, int)  # else a matrix norm
    return vector_norm(A, 2 if ord is None else ord, dim, keepdim) if vectors else None

"""The gradients of a linear layer with a loss per row, in chunks of the classes, in torch ops for any device.

`_rows.py` takes chunks of rows. With chunks of classes, each slice of the weight's gradient is one product over all
rows: its sums are in fp32 and rounded once, without an fp32 buffer as large as the weight. Each row may have its own
upstream gradient. The cost is one more product: the backward computes the logits again. Slope: gradient of a logit.
"""

import torch

from safeops.core import sums
from safeops.core.dtypes import HALF, to_one
from safeops.core.matmul import sums_wide, without_autocast
from safeops.ops.classification import cross_entropy

CHUNK = 2**23  # a chunk has this many logits, or 1/16 of all if that is more; as many slopes exist beside them
UPCAST = 2**21  # elements of a half operand that are upcast at a time, where torch has no product of half into fp32
NO_CLASS = torch.iinfo(torch.int64).min  # an ignore_index that no target minus a chunk's first class equals


def chunks_of(x, linear_weight, linear_bias, wide=False):
    """Yield (slice of the classes, logits (N, size of the slice)) per chunk, in new memory, in the operands' dtype.

    wide: see `logits_of`. Chunks are then half as large, as a logit takes twice the bytes."""
    rows, classes = max(1, len(x)), len(linear_weight)
    size = max(1, max(CHUNK // rows, classes // 16) // bytes_factor(x, wide))
    for first in range(0, classes, size):
        part = slice(first, first + size)
        yield part, logits_of(x, linear_weight[part], None if linear_bias is None else linear_bias[part], wide=wide)


def keeps_sums(x, wide):
    """True if the logits are fp32 sums of products of half operands."""
    return wide and x.dtype in HALF


def bytes_factor(x, wide):
    """How many times as many bytes a logit takes as an element of x."""
    return 2 if keeps_sums(x, wide) else 1


def logits_of(x, linear_weight, linear_bias, out=None, wide=False):
    """wide: True: the logits of half operands are the fp32 sums of their product, not rounded to half."""
    if keeps_sums(x, wide):
        return _wide_logits_of(x, linear_weight, linear_bias, out)
    w = linear_weight.mT
    return torch.mm(x, w, out=out) if linear_bias is None else torch.addmm(linear_bias, x, w, out=out)


def _wide_logits_of(x, linear_weight, linear_bias, out):
    bias = None if linear_bias is None else linear_bias.float()
    out = x.new_empty(len(x), len(linear_weight), dtype=torch.float32) if out is None else out
    if sums_wide(x.device):
        if bias is None:
            return torch.mm(x, linear_weight.mT, out_dtype=torch.float32, out=out)
        return torch.addmm(bias, x, linear_weight.mT, out_dtype=torch.float32, out=out)
    size = max(1, UPCAST // max(1, x.shape[1]))
    for rows in blocks(len(x), size):
        x_wide = x[rows].float()  # (exact, as is each product of two half numbers in fp32)
        for classes in blocks(len(linear_weight), size):
            w = linear_weight[classes].float().mT
            part = out[rows, classes]
            torch.mm(x_wide, w, out=part) if bias is None else torch.addmm(bias[classes], x_wide, w, out=part)
    return out


def blocks(length, size):
    return [slice(first, first + size) for first in range(0, length, size)]


def narrowed(x, dtype):
    """The contiguous fp32 matrix x (N, M) rounded to a half dtype, in x's own memory: x's values are lost.

    Row i of the result lies over the rows i / 2 and (i + 1) / 2 of x. So rows a to 2 a are written at a time: over rows
    of x below a, which were read before."""
    if x.dtype == dtype:
        return x
    result = x.view(-1).view(dtype)[: x.numel()].view(x.shape)
    first = -(-len(x) // 64)
    result[:first] = x[:first].to(dtype)
    while 0 < first < len(x):
        rows = slice(first, 2 * first)
        result[rows] = x[rows]
        first *= 2
    return result


def multiply(to, a, b, beta=1):
    """to = beta to + a b, in place. Sums have the dtype of `to`: that of a and b, or fp32 for half. beta: 0 or 1."""
    wide = {} if a.dtype == to.dtype else {"out_dtype": to.dtype}
    if not wide or sums_wide(to.device):
        torch.addmm(to, a, b, beta=beta, out=to, **wide)
        return
    size = max(1, cross_entropy.BLOCK // max(1, b.shape[1]))
    for first in range(0, len(to), size):
        block = slice(first, first + size)
        product = a[block] @ b
        to[block] = product if beta == 0 else to[block] + product


def products(
    x, linear_weight, linear_bias, keep, slopes, scale, compute, needs, wide=False, finish=lambda d_input: d_input
):
    """Returns the gradients of (input, weight, bias); one that is not needed has no elements.

    slopes(logits, slice of the classes): the gradient of these logits, times scale. It is rounded to x's dtype. wide:
    see `logits_of`. finish: called with the input's gradient when all chunks are summed, before the last product of the
    weight's gradient; returns the gradient."""
    need_input, need_weight, need_bias = needs
    d_input = x.new_zeros(x.shape if need_input else 0, dtype=compute)  # summed over the chunks in fp32
    d_weight = torch.empty_like(linear_weight if need_weight else x[:0, :0], memory_format=torch.contiguous_format)
    d_bias = x.new_empty(len(linear_weight) if need_bias else 0)

    def finish_rows(d_input):
        d_input.masked_fill_(~keep.unsqueeze(1), 0)  # (a row that is not kept may be 0 times inf or NaN)
        return finish(d_input if scale is None else d_input.div_(scale))

    if need_input and not len(linear_weight):
        d_input = finish_rows(d_input)
    with without_autocast(x):
        for part, logits in chunks_of(x, linear_weight, linear_bias, wide):
            slope = slopes(logits, part)
            del logits  # frees them before the slopes are rounded
            slope = slope.to(x.dtype)
            if need_bias:
                d_bias[part] = sums.total(slope, dim=0)
            if need_input:
                multiply(d_input, slope, linear_weight[part])
            if need_input and part.stop >= len(linear_weight):
                d_input = finish_rows(d_input)
            if need_weight:
                torch.mm(slope.mT, x, out=d_weight[part])
            del slope  # frees it before the next chunk
    if scale is not None:
        d_weight.div_(scale)
        d_bias.div_(scale)
    return d_input.to(x.dtype), d_weight, d_bias


def scale_of(x, linear_weight, largest, at_once=None):
    """For fp16, a power of two that brings the slopes, and products with them, to the upper end of fp16's range; else
    None. Without it the slopes of a mean over many rows underflow, and those of a scaled loss overflow. At the end the
    gradients are divided by the scale: one too large for fp16 becomes inf.

    largest: (N,) fp64, a bound of each row's |slope|. at_once: how many rows are in one product; None: all."""
    if x.dtype != torch.float16 or not x.numel() or not linear_weight.numel():
        return None
    top = largest.amax()
    of_weight = (largest.sum() if at_once is None else top * min(at_once, len(x))) * _magnitude(x).clamp(min=1)
    bound = torch.maximum(of_weight, 2 * top * _magnitude(linear_weight).clamp(min=1))
    return torch.where(bound.isfinite() & (bound > 0), to_one(bound) * 2.0**14, 1)


def _magnitude(x):
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).double()

"""The gradients of a linear layer with a loss per row, in chunks of the classes, in torch ops for any device.

`_rows.py` takes chunks of rows. With chunks of classes, each slice of the weight's gradient is one product over all
rows: its sums are in fp32 and rounded once, without an fp32 buffer as large as the weight. Each row may have its own
upstream gradient. The cost is one more product: the backward computes the logits again. Slope: gradient of a logit.
"""

import torch

from safeops.core import sums
from safeops.core.dtypes import to_one
from safeops.core.matmul import sums_wide, without_autocast
from safeops.ops.classification import cross_entropy

CHUNK = 2**23  # a chunk has this many logits, or 1/16 of all if that is more; as many slopes exist beside them
NO_CLASS = torch.iinfo(torch.int64).min  # an ignore_index that no target minus a chunk's first class equals


def chunks_of(x, linear_weight, linear_bias):
    """Yield (slice of the classes, logits (N, size of the slice)) per chunk, in new memory, in the operands' dtype."""
    rows, classes = max(1, len(x)), len(linear_weight)
    size = max(1, CHUNK // rows, classes // 16)
    for first in range(0, classes, size):
        part = slice(first, first + size)
        yield part, logits_of(x, linear_weight[part], None if linear_bias is None else linear_bias[part])


def logits_of(x, linear_weight, linear_bias, out=None):
    w = linear_weight.mT
    return torch.mm(x, w, out=out) if linear_bias is None else torch.addmm(linear_bias, x, w, out=out)


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


def products(x, linear_weight, linear_bias, keep, slopes, scale, compute, needs, finish=lambda d_input: d_input):
    """Returns the gradients of (input, weight, bias); one that is not needed has no elements.

    slopes(logits, slice of the classes): the gradient of these logits, times scale. finish: called with the input's
    gradient when all chunks are summed, before the last product of the weight's gradient; returns the gradient."""
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
        for part, logits in chunks_of(x, linear_weight, linear_bias):
            slope = slopes(logits, part)
            if need_bias:
                d_bias[part] = sums.total(slope, dim=0)
            if need_input:
                multiply(d_input, slope, linear_weight[part])
            if need_input and part.stop >= len(linear_weight):
                d_input = finish_rows(d_input)
            if need_weight:
                torch.mm(slope.mT, x, out=d_weight[part])
            del logits, slope  # frees them before the next chunk
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

"""linear_cross_entropy in torch ops for any device, in chunks of the rows; cross_entropy's kernels compute each chunk.

The upstream gradient of a mean or sum is one number, by which backward multiplies. So forward computes the gradients
too, while the logits of a chunk exist: three matrix products, where chunks of the classes (_chunks.py) take four. The
cost: the weight's gradient is summed over the chunks in fp32, with one pass over it per chunk. For half operands this
sum is a buffer of twice the weight's size, unless all rows are one chunk.
"""

import math

import torch
from torch.compiler import is_compiling

from safeops.core import private_torch
from safeops.core.dtypes import SMALLEST, WIDE, compute_dtype
from safeops.core.matmul import without_autocast
from safeops.core.route import PLAIN
from safeops.core.sums import total
from safeops.ops.classification import cross_entropy
from safeops.ops.classification._classification import refuse_missing_class, rows_of, weighed
from safeops.ops.classification.cross_entropy import _cross_entropy, _overwrite, count_row_stats
from safeops.ops.linear import _chunks
from safeops.ops.linear._chunks import (
    NO_CLASS,
    bytes_factor,
    keeps_sums,
    logits_of,
    multiply,
    narrowed,
    products,
    scale_of,
)

NAME = "linear_cross_entropy"
FEWEST = 1024  # rows of a chunk: with fewer, reading the weight slows down the product on a GPU
ENOUGH = 8192  # rows of a chunk: its products on a GPU take 25 times as long as the pass over the fp32 weight gradient


def rows_at_once(input, linear_weight, need_weight=False, low=True, wide=False):
    """The number of rows of a chunk. low: True for memory="low". wide: see `logits_of`; the bounds below are then of
    half as many logits, which have as many bytes.

    (1) On a GPU with low=False: about ENOUGH, or half of it without the weight's gradient. All rows, if there are at
    most ENOUGH + D and the weight is half: a single chunk needs no fp32 buffer for the weight's gradient.
    (2) Else: as many as hold 1/8 of all logits (at least CHUNK logits), less the fp32 buffer of a half weight's
    gradient. 0 if too few rows are left: then each chunk's pass over the weight's gradient costs more than the fourth
    product that chunks of the classes need."""
    rows, classes, width = len(input), max(1, len(linear_weight)), linear_weight.shape[1]
    half, cpu, factor = input.dtype not in WIDE, input.is_cpu, bytes_factor(input, wide)
    if not low and not cpu:
        enough = (ENOUGH if need_weight else ENOUGH // 2) // factor
        many = 1 if rows <= enough + (width // factor if need_weight and half else 0) else -(-rows // enough)
        return max(1, -(-rows // many))
    room = max(rows * classes // (8 * factor) - cross_entropy.BLOCK, _chunks.CHUNK // factor)
    if not need_weight:
        return max(1 if cpu else FEWEST // factor, room // classes)
    room -= classes * width * 4 // (input.element_size() * factor) if half else 0
    fewest = (256 if cpu else FEWEST) if half else 128
    size = max(0, room // classes)
    return size if size >= min(rows, fewest) else 0


def gradients_with_loss(input, linear_weight, linear_bias, memory, takes=True, wide=False):
    """Returns (rows of a chunk, needs: a bool each for input, weight and bias: True if forward computes the gradient).
    Forward computes all gradients that are needed, or none."""
    operands, low = [input, linear_weight, linear_bias], memory == "low"
    if private_torch.is_exporting() or not all(x is None or type(x) in PLAIN for x in operands):
        return 0, [False] * 3  # (in torch.export sizes are symbols: comparing them adds guards)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in operands]
    takes = takes and any(needs) and len(linear_weight)
    size = rows_at_once(input, linear_weight, needs[1], low, wide) if takes else 0
    return (size, needs) if size else (rows_at_once(input, linear_weight, low=low, wide=wide), [False] * 3)


def forward(
    input, linear_weight, target, linear_bias, weight, mask, row_weight, divisor, ignore_index, label_smoothing, z_loss,
    temperature, softcap, wide, mean, at_once, *needs,
):  # fmt: skip
    """Returns (loss, keep, weights that a mean divides by, row_stats, factor, d_input, d_weight, d_bias).

    If a gradient is needed, loss is the rows' sum, 0-dim; its gradients are d_input, d_weight and d_bias times factor;
    row_stats is empty. Else loss has an element per row, row_stats is for backward, and the gradients are empty. All
    are in fp32 or fp64, but d_weight is in the weight's dtype if all rows are one chunk."""
    refuse_missing_class(NAME, target, mask, ignore_index, len(linear_weight), "linear_weight", linear_weight.shape)
    dtype, with_loss = compute_dtype(input.dtype), any(needs)
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    class_index, keep, weights = rows_of(len(linear_weight), target, weight, mask, ignore_index, compute)
    loss = input.new_empty(class_index.shape, dtype=dtype)
    many = count_row_stats(target, weight, label_smoothing)
    row_stats = loss.new_empty((many, 0 if with_loss else len(loss)), dtype=compute)
    factor, gradients = loss.new_empty(0), empty_gradients(input, linear_weight, needs, at_once)
    size = max(1, min(len(input), at_once or rows_at_once(input, linear_weight, wide=wide)))
    options = label_smoothing, z_loss, temperature, softcap
    if with_loss:
        g = keep.double() if row_weight is None else torch.where(keep, row_weight, 0).double()
        of_class = weights
        weights = weights if row_weight is None else weighed(loss, keep, weights, row_weight)[1]
        factor = _divisor(g, keep, weights, divisor, mean)
        g = g / factor
        scale = _scale(g, keep, input, linear_weight, linear_bias, of_class, weight, None, *options, wide, size)
        if scale is not None:
            g, factor = g * scale, factor / scale
        g, (d_input, d_weight, d_bias) = g.to(compute), gradients
        d_bias.zero_()
    buffer = input.new_empty(size, len(linear_weight), dtype=dtype if keeps_sums(input, wide) else input.dtype)
    with without_autocast(input):
        for first in range(0, len(input), size):
            part = slice(first, first + size)
            x, kept = torch.where(keep[part].unsqueeze(1), input[part], 0), keep[part]
            logits = logits_of(x, linear_weight, linear_bias, buffer[: len(x)], wide)
            results = _cross_entropy.forward(logits, class_index[part], weight, kept, NO_CLASS, *options)
            loss[part], _, _, part_stats = results
            if not with_loss:
                row_stats[:, part] = part_stats
                continue
            _overwrite(g[part], logits, class_index[part], part_stats, weight, kept, NO_CLASS, *options)
            slopes = narrowed(logits, x.dtype)
            if needs[0]:
                multiply(d_input[part], slopes, linear_weight, beta=0)
            if needs[1]:
                multiply(d_weight, slopes.mT, x, beta=int(first > 0))
            if needs[2]:
                d_bias += total(slopes, dim=0, dtype=dtype)
    if with_loss:
        loss = loss if row_weight is None else weighed(loss, keep, None, row_weight)[0]
        loss = total(loss, keep, dtype=torch.float64)
        if needs[1] and not len(input):
            d_weight.zero_()
    weights = input.new_empty(0, dtype=dtype) if weights is None else weights
    return loss, keep, weights, row_stats, factor, *gradients


def empty_gradients(input, linear_weight, needs, at_once=None):
    """Uninitialized gradients of input, weight and bias; one that is not needed has no elements. at_once: None: they
    have the operands' dtype. Rows of a chunk: fp32 or fp64, but the weight's in its dtype if all rows are one chunk."""
    dtypes = [input.dtype] * 3
    if at_once is not None:
        wide = compute_dtype(input.dtype)
        dtypes = wide, input.dtype if at_once >= len(input) else wide, wide
    shapes = input.shape, linear_weight.shape, linear_weight.shape[:1]
    return [
        input.new_empty(shape if need else [0] * len(shape), dtype=dtype)
        for shape, need, dtype in zip(shapes, needs, dtypes)
    ]


def _divisor(g, keep, weights, divisor, mean):
    """The number that forward divides the rows' weights g by: the divisor of a mean, 1 for a sum; the largest weight
    if the quotients would not fit fp32.

    Backward multiplies the gradients by grad times this number. For a mean, grad is the caller's gradient, usually 1,
    times 1 / divisor: grad times this number is then 1, and nothing is rounded."""
    one = torch.ones_like(g[:1].sum())
    largest = g.abs().amax() if g.numel() else one
    if not mean:
        divisor = one
    elif divisor is None:
        divisor = keep.sum() if weights is None else weights.sum()
    divisor = divisor.detach().double().abs()
    quotient = largest / divisor
    fits = (divisor > 0) & (quotient > 2.0**-60) & (quotient < 2.0**60)
    return torch.where(fits, divisor, torch.where((largest > 0) & largest.isfinite(), largest, 1))


def _scale(
    g, keep, x, linear_weight, linear_bias, weights, weight, log_sum, label_smoothing, z_loss, temperature, softcap,
    wide, at_once=None,
):  # fmt: skip
    """`scale_of` for rows with upstream gradients g. weights: class weight per row; log_sum: logsumexp, or None."""
    if x.dtype != torch.float16 or not linear_weight.numel() or not x.numel():
        return None
    x, largest = torch.where(keep.unsqueeze(1), x, 0), g.double().abs() / temperature
    if weight is not None:  # (without smoothing, a row's slopes contain the weight of its own class only)
        heaviest = weights.double().abs()
        largest = largest * (heaviest if label_smoothing == 0 else heaviest + weight.double().abs().amax())
    if z_loss:
        log_sum = _reach(x, linear_weight, linear_bias, temperature, wide) if log_sum is None else log_sum.abs()
        largest = largest * (1 + 2 * z_loss * log_sum)
    return scale_of(x, linear_weight, largest, at_once)


def _reach(x, linear_weight, linear_bias, temperature, wide):
    """A bound of |logsumexp|: log C + max |logit|, where |logit| is at most |x| |w| + |bias|, and 2^16 in fp16 (2^64 if
    the logits are wide, whose factors are in fp16's range)."""
    norms = (torch.linalg.vector_norm(t, dim=1, dtype=torch.float32) for t in (x, linear_weight))
    reach = math.prod(norm.amax().double() for norm in norms)
    reach = reach if linear_bias is None else reach + linear_bias.double().abs().amax()
    return reach.nan_to_num().clamp(max=2.0**64 if wide else 2.0**16) / temperature + math.log(len(linear_weight))


def backward(grad, gradients, factor, needs, dtype, keep):
    """The saved gradients of the rows' sum, times factor and the upstream gradient, rounded once to `dtype`. In place
    if no other backward can follow."""
    last = not is_compiling() and not private_torch.keeps_graph() and not private_torch.is_batched(grad)
    # (1-dim: torch would round a 0-dim factor to the dtype of a half gradient)
    factor = (grad * factor).to(gradients[0].dtype).unsqueeze(0)
    results = [_times(d, factor, dtype, last) if need else None for d, need in zip(gradients, needs)]
    if needs[0]:
        results[0].masked_fill_(~keep.unsqueeze(1), 0)  # (a row that is not kept may be 0 times inf or NaN)
    return results


def _times(d, factor, dtype, last):
    if not last:
        return (d * factor).to(dtype)
    result = d if d.dtype == dtype else torch.empty_like(d, dtype=dtype)
    # (in blocks: torch's CPU kernel makes fp32 copies of half operands and results)
    size = max(1, len(d) if d.is_cuda else cross_entropy.BLOCK // max(1, d[:1].numel()))
    for first in range(0, len(d), size):
        block = slice(first, first + size)
        torch.mul(d[block], factor, out=result[block])
    return result


# ---- an upstream gradient for each row: in chunks of the classes


def backward_of_rows(
    grad, input, linear_weight, target, row_stats, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss,
    temperature, softcap, wide, *needs,
):  # fmt: skip
    class_index, keep, weights = rows_of(len(linear_weight), target, weight, mask, ignore_index, row_stats.dtype)
    options = label_smoothing, z_loss, temperature, softcap, wide
    layer = input, linear_weight, linear_bias
    return gradients(grad, *layer, class_index, keep, weights, weight, row_stats, options, needs)


def gradients(
    grad, input, linear_weight, linear_bias, class_index, keep, weights, weight, row_stats, options, needs, **finish
):  # fmt: skip
    """Returns the gradients of (input, weight, bias); one that is not needed has no elements. class_index: class of
    each row, relative to linear_weight's first class. weights: class weight of each row. weight: class weights of
    linear_weight's classes. finish: for `products`."""
    compute = compute_dtype(input.dtype, grad.dtype)
    x, g = torch.where(keep.unsqueeze(1), input, 0), torch.where(keep, grad, 0)
    scale = _scale(g, keep, x, linear_weight, linear_bias, weights, weight, row_stats[0] + row_stats[1], *options)
    g = (g if scale is None else g.double() * scale).to(compute)
    label_smoothing, *others, wide = options
    if weight is not None and label_smoothing == 0:
        # A row's class, and so its class weight, may be in another chunk. The kernel then reads the weight from the
        # row_stats, which hold it only with smoothing: (maximum, log_total, k = weight, e = 0). So label_smoothing is
        # set to the least number that is not 0.
        row_stats = torch.stack([*row_stats, weights.to(row_stats.dtype), torch.zeros_like(row_stats[0])])
        label_smoothing = SMALLEST

    def slopes(logits, part):
        of_part = None if weight is None else weight[part]
        return _cross_entropy.backward(
            *(g, logits, class_index - part.start, row_stats, of_part, keep, NO_CLASS, label_smoothing),
            *(*others, True, False, True),
        )[0]

    return products(x, linear_weight, linear_bias, keep, slopes, scale, compute, needs, wide, **finish)

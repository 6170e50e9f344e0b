"""A mean or sum of linear_cross_entropy in chunks of the rows, with its gradients, in plain torch for any device.

The upstream gradient of a sum is one number, by which backward multiplies: the gradients are made with the loss, while
the logits of a chunk are there, and nothing is computed again. Three products, where chunks of the classes
(`_linear_chunks`) take four. The price: the weight's gradient is summed over the chunks, in fp32, with a pass over it
for each; of half operands that is a buffer twice as large as the weight.
"""

import torch
from torch.compiler import is_compiling

from safeops.core import private_torch
from safeops.core.dtypes import WIDE, compute_dtype
from safeops.core.route import PLAIN
from safeops.core.sums import total
from safeops.ops.rows import _linear_chunks
from safeops.ops.rows._classification import refuse_missing_class, rows_of
from safeops.ops.rows._linear_chunks import existing_classes, logits_of, losses, row_stats, scale_of, slopes_by
from safeops.ops.rows._matmul import without_autocast

BLOCK = 2**22  # slopes, or numbers of a half product, that exist beside a chunk's logits


def rows_at_once(input, linear_weight, need_weight):
    """As many as make an eighth of all logits, or CHUNK of them, less the buffer for a half weight's gradient (a wide
    one becomes the gradient). 0 where too few are left: then each chunk's pass over the gradient costs more than the
    fourth product of chunks of the classes."""
    rows, classes, width = len(input), max(1, len(linear_weight)), linear_weight.shape[1]
    room, wide = max(rows * classes // 8 - BLOCK, _linear_chunks.CHUNK), input.dtype in WIDE
    if not need_weight:
        return max(1, room // classes)
    room -= 0 if wide else classes * width * 4 // input.element_size()
    fewest = 128 if wide else 256 if input.is_cpu else 1024  # (GPUs: predicted from bandwidth, not measured)
    size = max(0, room // classes)
    return size if size >= min(rows, fewest) else 0


def gradients_with_loss(input, linear_weight, linear_bias):
    """Which of them get their gradient with the loss: those that have one, or none."""
    operands = [input, linear_weight, linear_bias]
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in operands]
    # (torch.export knows sizes by symbols, and must not be asked how large they are)
    plain = all(x is None or type(x) in PLAIN for x in operands) and not private_torch.is_exporting()
    takes = any(needs) and plain and len(linear_weight) > 0
    return needs if takes and rows_at_once(input, linear_weight, needs[1]) else [False] * 3


def forward(input, linear_weight, target, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss, *needs):
    """(sum, keep, weight of each row, nothing, the sum's gradients: in fp32 or fp64, those not needed are empty)."""
    count, dtype = len(linear_weight), compute_dtype(input.dtype)
    refuse_missing_class(_linear_chunks.NAME, target, mask, ignore_index, count, "linear_weight", linear_weight.shape)
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    place, keep, weights = rows_of(count, target, weight, mask, ignore_index, compute)
    classes = existing_classes(count, linear_bias, weight, input.device)
    d_input, d_weight, d_bias = (d.zero_() for d in empty_gradients(input, linear_weight, needs, dtype))
    loss = input.new_empty(place.shape, dtype=dtype)
    size = max(1, min(len(input), rows_at_once(input, linear_weight, needs[1])))
    buffer = input.new_empty(size, count)
    with without_autocast(input):
        for first in range(0, len(input), size):
            part = slice(first, first + size)
            w = None if weights is None else weights[part]
            x = torch.where(keep[part].unsqueeze(1), input[part], 0)
            logits = logits_of(x, linear_weight, linear_bias, buffer[: len(x)])
            stats = row_stats([(slice(0, count), logits)], place[part], classes.weights if label_smoothing else None)
            loss[part], log_sum = losses(stats, keep[part], w, classes, label_smoothing, z_loss)
            g = keep[part].double()
            scale = scale_of(x, linear_weight, g, log_sum, w, classes, z_loss)
            per_row = g if scale is None else g * scale, keep[part], log_sum, w
            slopes = slopes_by(x, w, label_smoothing, z_loss)
            slope = _overwrite_by_slopes(logits, slopes, place[part], per_row, classes, label_smoothing, z_loss, dtype)
            if needs[0]:
                d_input[part] = _unscale(slope @ linear_weight, dtype, scale)
            if needs[1]:
                _add_product(d_weight, slope.mT, x, scale)
            if needs[2]:
                d_bias += _unscale(total(slope, dim=0, dtype=dtype), dtype, scale)
    weights, log_sum = loss.new_empty(0) if weights is None else weights, input.new_empty(0, dtype=torch.float64)
    return total(loss, keep, dtype=torch.float64), keep, weights, log_sum, d_input, d_weight, d_bias


def empty_gradients(input, linear_weight, needs, dtype):
    shapes = input.shape, linear_weight.shape, linear_weight.shape[:1]
    return [input.new_empty(shape if need else [0] * len(shape), dtype=dtype) for shape, need in zip(shapes, needs)]


def _overwrite_by_slopes(logits, slopes, place, per_row, classes, label_smoothing, z_loss, compute):
    """The logits' memory, with the slopes to them in it, which are made a block of rows at a time."""
    size = max(1, BLOCK // max(1, logits.shape[1]))
    for first in range(0, len(logits), size):
        block = slice(first, first + size)
        rows = (None if t is None else t[block] for t in per_row)
        slope = slopes(*rows, classes, label_smoothing, z_loss, compute)
        logits[block] = slope(logits[block], place[block], slice(0, logits.shape[1]))
    return logits


def _unscale(product, dtype, scale):
    return product if scale is None else product.to(dtype).div_(scale)


def _add_product(to, a, b, scale):
    """to += a b / scale"""
    if a.dtype == to.dtype:
        to.addmm_(a, b)
        return
    size = max(1, BLOCK // max(1, b.shape[1]))
    for first in range(0, len(to), size):
        block = slice(first, first + size)
        to[block] += _unscale(a[block] @ b, to.dtype, scale)


def backward(grad, gradients, needs, dtype, keep):
    """The sum's gradients times its upstream one, rounded once; in their own memory where no other backward follows."""
    last = not is_compiling() and not private_torch.keeps_graph() and not private_torch.is_batched(grad)
    results = [(d.mul_(grad) if last else d * grad).to(dtype) if need else None for d, need in zip(gradients, needs)]
    if needs[0]:
        results[0].masked_fill_(~keep.unsqueeze(1), 0)  # (of a row that does not exist: 0 times what is not finite)
    return results

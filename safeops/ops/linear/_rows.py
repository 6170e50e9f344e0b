"""linear_cross_entropy in plain torch for any device: in chunks of the rows, each by the kernels of cross_entropy.

The upstream gradient of a mean or sum is one number, by which backward multiplies: the gradients are made with the
loss, while the logits of a chunk are there, and nothing is computed again. Three products, where chunks of the classes
(`_chunks`) take four. The price: the weight's gradient is summed over the chunks, in fp32, with a pass over it
for each; of half operands that is a buffer twice as large as the weight, unless all rows are one chunk.
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
from safeops.ops.classification.cross_entropy import _cross_entropy, _overwrite, count_numbers
from safeops.ops.linear import _chunks
from safeops.ops.linear._chunks import NO_CLASS, logits_of, multiply, products, scale_of

NAME = "linear_cross_entropy"
FEWEST = 1024  # rows of a GPU's product that is not slowed down by reading the weight for it
ENOUGH = 8192  # rows for which a GPU's products take 25 times as long as the pass over the weight's gradient in fp32


def rows_at_once(input, linear_weight, need_weight=False, low=True):
    """Where there is room, on a GPU: ENOUGH, or all where the buffer for a half weight's gradient is larger than what
    is left. Else (low) as many as make an eighth of all logits, or CHUNK of them, less that buffer (a wide one becomes
    the gradient): 0 where too few are left, and each chunk's pass over the gradient costs more than the fourth product
    of chunks of the classes."""
    rows, classes, width = len(input), max(1, len(linear_weight)), linear_weight.shape[1]
    wide, cpu = input.dtype in WIDE, input.is_cpu
    if not low and not cpu:
        enough = ENOUGH if need_weight else ENOUGH // 2
        many = 1 if rows <= enough + (width if need_weight and not wide else 0) else -(-rows // enough)
        return max(1, -(-rows // many))
    room = max(rows * classes // 8 - cross_entropy.BLOCK, _chunks.CHUNK)
    if not need_weight:
        return max(1 if cpu else FEWEST, room // classes)
    room -= 0 if wide else classes * width * 4 // input.element_size()
    fewest = 128 if wide else 256 if cpu else FEWEST
    size = max(0, room // classes)
    return size if size >= min(rows, fewest) else 0


def gradients_with_loss(input, linear_weight, linear_bias, memory, takes=True):
    """(rows at once, which operands get their gradient with the loss): those that have one, or none."""
    operands, low = [input, linear_weight, linear_bias], memory == "low"
    if private_torch.is_exporting() or not all(x is None or type(x) in PLAIN for x in operands):
        return 0, [False] * 3  # (torch.export knows sizes by symbols, and must not be asked how large they are)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in operands]
    size = rows_at_once(input, linear_weight, needs[1], low) if takes and any(needs) and len(linear_weight) else 0
    return (size, needs) if size else (rows_at_once(input, linear_weight, low=low), [False] * 3)


def forward(
    input, linear_weight, target, linear_bias, weight, mask, row_weight, divisor, ignore_index, label_smoothing, z_loss,
    temperature, softcap, mean, at_once, *needs,
):  # fmt: skip
    """(loss, keep, weights that a mean divides by, numbers of the rows, factor, gradients).

    Where a gradient is needed, loss is the sum, whose gradients are these times the factor, and there are no numbers;
    else it is that of each row. In fp32 or fp64, but the weight's gradient of one product, which is in its dtype."""
    refuse_missing_class(NAME, target, mask, ignore_index, len(linear_weight), "linear_weight", linear_weight.shape)
    dtype, with_loss = compute_dtype(input.dtype), any(needs)
    compute = dtype if weight is None else compute_dtype(dtype, weight.dtype)
    place, keep, weights = rows_of(len(linear_weight), target, weight, mask, ignore_index, compute)
    loss = input.new_empty(place.shape, dtype=dtype)
    many = count_numbers(target, weight, label_smoothing)
    numbers = loss.new_empty((many, 0 if with_loss else len(loss)), dtype=compute)
    factor, gradients = loss.new_empty(0), empty_gradients(input, linear_weight, needs, at_once)
    size = max(1, min(len(input), at_once or rows_at_once(input, linear_weight)))
    options = label_smoothing, z_loss, temperature, softcap
    if with_loss:
        g = keep.double() if row_weight is None else torch.where(keep, row_weight, 0).double()
        of_class = weights
        weights = weights if row_weight is None else weighed(loss, keep, weights, row_weight)[1]
        factor = _divisor(g, keep, weights, divisor, mean)
        g = g / factor
        scale = _scale(g, keep, input, linear_weight, linear_bias, of_class, weight, None, *options, size)
        if scale is not None:
            g, factor = g * scale, factor / scale
        g, (d_input, d_weight, d_bias) = g.to(compute), gradients
        d_bias.zero_()
    buffer = input.new_empty(size, len(linear_weight))
    with without_autocast(input):
        for first in range(0, len(input), size):
            part = slice(first, first + size)
            x, kept = torch.where(keep[part].unsqueeze(1), input[part], 0), keep[part]
            logits = logits_of(x, linear_weight, linear_bias, buffer[: len(x)])
            loss[part], _, _, of_rows = _cross_entropy.forward(logits, place[part], weight, kept, NO_CLASS, *options)
            if not with_loss:
                numbers[:, part] = of_rows
                continue
            _overwrite(g[part], logits, place[part], of_rows, weight, kept, NO_CLASS, *options)
            if needs[0]:
                multiply(d_input[part], logits, linear_weight, beta=0)
            if needs[1]:
                multiply(d_weight, logits.mT, x, beta=int(first > 0))
            if needs[2]:
                d_bias += total(logits, dim=0, dtype=dtype)
    if with_loss:
        loss = loss if row_weight is None else weighed(loss, keep, None, row_weight)[0]
        loss = total(loss, keep, dtype=torch.float64)
        if needs[1] and not len(input):
            d_weight.zero_()
    weights = input.new_empty(0, dtype=dtype) if weights is None else weights
    return loss, keep, weights, numbers, factor, *gradients


def empty_gradients(input, linear_weight, needs, at_once=None):
    """at_once: so many rows are in one product; None: the gradients are in the operands' dtype."""
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
    """A number that the rows' weights g are divided by: what a mean divides by, of a sum 1; where the quotients would
    not fit fp32, the largest of them.

    The gradients are multiplied by it again: the upstream one of a mean is then 1 as a rule, and nothing is rounded."""
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
    at_once=None,
):  # fmt: skip
    """scale_of rows with the upstream gradients g, and weights of their classes. log_sum: None if it is not known."""
    if x.dtype != torch.float16 or not linear_weight.numel() or not x.numel():
        return None
    x, largest = torch.where(keep.unsqueeze(1), x, 0), g.double().abs() / temperature
    if weight is not None:  # what no row has, of classes, may be anything
        heaviest = weights.double().abs()
        largest = largest * (heaviest if label_smoothing == 0 else heaviest + weight.double().abs().amax())
    if z_loss:
        log_sum = _reach(x, linear_weight, linear_bias, temperature) if log_sum is None else log_sum.abs()
        largest = largest * (1 + 2 * z_loss * log_sum)
    return scale_of(x, linear_weight, largest, at_once)


def _reach(x, linear_weight, linear_bias, temperature):
    """A bound of |logsumexp|: no logit is larger than fp16 holds, or than its vectors' norms say."""
    norms = (torch.linalg.vector_norm(t, dim=1, dtype=torch.float32) for t in (x, linear_weight))
    reach = math.prod(norm.amax().double() for norm in norms)
    reach = reach if linear_bias is None else reach + linear_bias.double().abs().amax()
    return reach.nan_to_num().clamp(max=2.0**16) / temperature + math.log(len(linear_weight))


def backward(grad, gradients, factor, needs, dtype, keep):
    """The sum's gradients times its upstream one, rounded once; in their own memory where no other backward follows."""
    last = not is_compiling() and not private_torch.keeps_graph() and not private_torch.is_batched(grad)
    # (of one dim: a number of none would be rounded to the dtype of a half gradient)
    factor = (grad * factor).to(gradients[0].dtype).unsqueeze(0)
    results = [_times(d, factor, dtype, last) if need else None for d, need in zip(gradients, needs)]
    if needs[0]:
        results[0].masked_fill_(~keep.unsqueeze(1), 0)  # (of a row that does not exist: 0 times what is not finite)
    return results


def _times(d, factor, dtype, last):
    if not last:
        return (d * factor).to(dtype)
    result = d if d.dtype == dtype else torch.empty_like(d, dtype=dtype)
    # (a CPU's kernel copies what it reads and writes to fp32)
    size = max(1, len(d) if d.is_cuda else cross_entropy.BLOCK // max(1, d[:1].numel()))
    for first in range(0, len(d), size):
        block = slice(first, first + size)
        torch.mul(d[block], factor, out=result[block])
    return result


# ---- each row's own upstream gradient: in chunks of the classes


def backward_of_rows(
    grad, input, linear_weight, target, numbers, linear_bias, weight, mask, ignore_index, label_smoothing, z_loss,
    temperature, softcap, *needs,
):  # fmt: skip
    place, keep, weights = rows_of(len(linear_weight), target, weight, mask, ignore_index, numbers.dtype)
    options = label_smoothing, z_loss, temperature, softcap
    return gradients(grad, input, linear_weight, linear_bias, place, keep, weights, weight, numbers, options, needs)


def gradients(
    grad, input, linear_weight, linear_bias, place, keep, weights, weight, numbers, options, needs, **finish
):  # fmt: skip
    """Those that are needed, the others empty. place: counted from the first class of linear_weight. weights: of the
    rows; weight: of these classes. finish: as of `products`."""
    compute = compute_dtype(input.dtype, grad.dtype)
    x, g = torch.where(keep.unsqueeze(1), input, 0), torch.where(keep, grad, 0)
    scale = _scale(g, keep, x, linear_weight, linear_bias, weights, weight, numbers[0] + numbers[1], *options)
    g = (g if scale is None else g.double() * scale).to(compute)
    label_smoothing, *others = options
    if weight is not None and label_smoothing == 0:
        # A class of another chunk has its weight in the rows' numbers alone, and of smoothing alone are there such.
        numbers = torch.stack([*numbers, weights.to(numbers.dtype), torch.zeros_like(numbers[0])])
        label_smoothing = SMALLEST

    def slopes(logits, part):
        of_part = None if weight is None else weight[part]
        return _cross_entropy.backward(
            g, logits, place - part.start, numbers, of_part, keep, NO_CLASS, label_smoothing, *others, True, False, True
        )[0]

    return products(x, linear_weight, linear_bias, keep, slopes, scale, compute, needs, **finish)

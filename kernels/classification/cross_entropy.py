"""cross_entropy of each row. y is its class, s the label smoothing, L = log sum exp x, and A the number of classes
whose logit is not -inf:

    loss = (1 - s) w_y (L - x_y) + s / A sum_c w_c (L - x_c) + z L^2

For class probabilities q the first term is (1 - s) sum_c w_c q_c (L - x_c).

The row_stats are the numbers per row that the backward needs: L in two parts, maximum and log_total = L - maximum,
which would be lost beside a large maximum; and, where the call has them, k and e (cross_entropy_backward.py).
"""

import torch
import triton
import triton.language as tl

from ..engine.blocks import is_finished
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.math import log_any
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import declare, one_per_row, part_of, piece_of, tile_at
from ..engine.row_loss import (
    add_up,
    class_dim,
    class_of,
    count_stats,
    own_class,
    per_class,
    per_row,
    reduced_results,
    reduction,
    row_results,
    store_stat,
)
from ..engine.row_plan import SUM, launch
from ..engine.tile import fetch, in_batch, store
from .cross_entropy_sums import BEST_CLASS, SUMS, merge_partials, store_state, sum_tiles, widened
from .logits import logits_kind, logits_numbers, shaped


@triton.jit
def finish(state, kept, target_logit, w, smoothing, z_loss, config):
    """Returns (loss, maximum, log_total, k, e) of each row, with L = maximum + log_total, in the dtype of its sums:
    fp64 if they were merged from pieces. ENTROPY: the row's entropy in place of k."""
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    SMOOTH: tl.constexpr = config.SMOOTH
    maximum, total, target_weight, target_sum, count, weight_sum, logit_sum = tl.tuple(
        [tl.where(kept, tl.expand_dims(s, ACROSS), 0.0) for s in state]
    )
    target_logit, w = target_logit.to(maximum.dtype), w.to(maximum.dtype)
    smoothing, z_loss = tl.full([1, 1], smoothing, maximum.dtype), tl.full([1, 1], z_loss, maximum.dtype)
    nothing = total == 0  # all logits are -inf: the loss is NaN, as in torch
    log_total, maximum = log_any(tl.where(nothing, float("nan"), total)), tl.where(nothing, float("-inf"), maximum)
    certain = (maximum == float("inf")) & (total == 1) & (target_logit == maximum) & (z_loss == 0)
    certain = certain & (not config.HAS_Q) & (not SMOOTH)
    # a logit of +inf gives NaN, unless it is the logit of the row's class and no other is +inf
    shows = (maximum == float("inf")) & ~certain
    maximum, log_total = tl.where(shows, float("nan"), maximum), tl.where(shows, float("nan"), log_total)
    if config.HAS_Q:
        # (for an infinite target_weight the difference would be inf - inf)
        loss = tl.where(
            tl.abs(target_weight) < float("inf"), target_weight * log_total - target_sum, target_weight
        )  # sum w q (L - x)
        factor = (1 - smoothing) * target_weight
    else:
        loss = tl.where(certain, 0.0, w * ((maximum - target_logit) + log_total))  # w (L - x_y)
        factor = (1 - smoothing) * w
    uniform = smoothing
    if SMOOTH:
        uniform = smoothing / count
        weight_sum = weight_sum if config.WEIGHT else count
        loss = (1 - smoothing) * loss + uniform * (weight_sum * log_total - logit_sum)
        factor += uniform * weight_sum
    loss = tl.where(z_loss == 0, loss, loss + z_loss * (maximum + log_total) * (maximum + log_total))
    if config.ENTROPY:
        factor = tl.where(certain, 0.0, log_total - target_sum / total)  # - sum p log p
    return loss, maximum, log_total, factor, uniform


@triton.jit
def class_and_logit(x, target, mask, weight, ignore_index, parameters, space, m, n, config):
    """Returns (kept, w, target_logit) of each row: True where it is kept; the weight and the logit of its class."""
    class_index, kept, w = class_of(target, mask, weight, ignore_index, space, m, n, config)
    target_logit = w
    if target is not None:
        pointer = own_class(tl.where(kept, class_index, 0), x, space, m, n, config)
        target_logit, _ = shaped(tl.load(pointer, mask=kept, other=0).to(config.C), parameters, config.LOGITS)
    return kept, w, target_logit


CrossEntropyConfig = constants(
    "SMOOTH HAS_Q WEIGHT ENTROPY ARGMAX LOGITS REDUCE EMPTY_NAN PEEL AXIS PIECES BM BN BS LM LN VEC C I"
)


@triton.jit
def cross_entropy_kernel(
    x: Operand, probabilities: Operand, target: Operand, mask: Operand, loss: Operand, keep: Operand, weights: Operand,
    row_stats: Operand, weight: Operand, partial: tl.pointer_type, counter: tl.pointer_type, smoothing: tl.float64,
    z_loss: tl.float64, ignore_index: tl.float64, parameters: tl.float64, count: tl.tensor, space: Space, parts: Parts,
    config: CrossEntropyConfig,
):  # fmt: skip
    """count: the number of rows, and the distance between the numbers of a row in row_stats. REDUCE: `loss` is the sum
    or mean of all rows, and `weights` the divisor of a mean. ENTROPY: `loss` has log probability, entropy and L of each
    row. ARGMAX: `weights` has the class of its largest logit, and `keep` True where that is the row's class."""
    I: tl.constexpr = config.I
    AXIS: tl.constexpr = config.AXIS
    SMOOTH: tl.constexpr = config.SMOOTH
    BO: tl.constexpr = config.BM if AXIS == INNER else config.BN
    split, group, batch, block = part_of(parts.splits, parts.across, I)
    space = in_batch(space, batch, (x, probabilities, target, mask, loss, keep, weights, row_stats))
    m, n = tile_at(space, block, 0, config)

    if AXIS == INNER:  # before the logits: the load of target_logit has to wait for that of the class
        kept, w, target_logit = class_and_logit(x, target, mask, weight, ignore_index, parameters, space, m, n, config)
    finished = True
    if config.PIECES:
        pieces, rows = parts.pieces, parts.groups.to(I) * BO
        output = group * BO + tl.arange(0, BO).to(I)
        last = tl.minimum((split + 1) * parts.per_split, pieces)
        if AXIS == INNER:  # a long row that is not kept is not read
            last = tl.where(tl.max(tl.max(kept.to(tl.int32), 1), 0) > 0, last, 0)
        for piece in range(split * parts.per_split, last):
            start, end = piece_of(piece, parts)
            state = sum_tiles(start, end, block, x, probabilities, weight, parameters, space, config)
            store_state(partial + piece * rows + output, pieces * rows, widened(state), config)
        finished = is_finished(counter + group, parts.splits)
    else:
        state = sum_tiles(0, parts.tiles, block, x, probabilities, weight, parameters, space, config)
    if finished:
        if config.PIECES:
            state = merge_partials(partial, pieces, output, rows, BO, config)
        if AXIS != INNER:
            kept, w, target_logit = class_and_logit(
                x, target, mask, weight, ignore_index, parameters, space, m, n, config
            )
        # one number per row from here on: (BM, 1), or (1, BN) for rows across memory
        value, maximum, log_total, factor, uniform = finish(state, kept, target_logit, w, smoothing, z_loss, config)
        inside = one_per_row(space, m, n, config)
        has_classes = kept & ((space.N if AXIS == INNER else space.M) > 0)  # without any class the loss is 0
        next_stat = count.to(tl.int64)
        value, w = tl.where(has_classes, value, 0.0), tl.where(kept, w, 0.0)
        if config.ENTROPY:
            store(loss, space, m, n, -value, inside, True)
            store_stat(loss, next_stat, space, m, n, tl.where(has_classes, factor, 0.0), inside)
            store_stat(loss, 2 * next_stat, space, m, n, tl.where(has_classes, maximum + log_total, 0.0), inside)
            if config.ARGMAX:
                best = tl.expand_dims(state[BEST_CLASS], 1 if AXIS == INNER else 0).to(tl.int64)
                own = fetch(target, space, m, n, inside, True).to(tl.int64)
                store(weights, space, m, n, tl.where(has_classes, best, 0), inside, True)
                store(keep, space, m, n, has_classes & (best == own), inside, True)
        elif not config.REDUCE:
            store(loss, space, m, n, value, inside, True)
            store(keep, space, m, n, kept, inside, True)
            if weights is not None:
                store(weights, space, m, n, w, inside, True)
        store(row_stats, space, m, n, tl.where(has_classes, maximum, 0.0), inside, True)
        store_stat(row_stats, next_stat, space, m, n, tl.where(has_classes, log_total, 0.0), inside)
        if config.HAS_Q or (config.WEIGHT and SMOOTH) or config.ENTROPY:
            next_stat += count
            store_stat(row_stats, next_stat, space, m, n, tl.where(has_classes, factor, 0.0), inside)
        if SMOOTH:
            next_stat += count
            store_stat(row_stats, next_stat, space, m, n, tl.where(has_classes, uniform, 0.0), inside)
        if config.REDUCE:
            if config.PIECES:
                partial += SUMS * pieces * rows
                counter += tl.where(parts.splits > 1, parts.groups, 0)
            add_up(
                value, kept, w, loss, weights, partial, counter, group, parts.groups, config,
                config.WEIGHT and not config.HAS_Q,
            )  # fmt: skip


CROSS_ENTROPY = declare(cross_entropy_kernel, tile_bytes=16384)  # large tiles: four accesses per thread in flight
MANY_SUMS = declare(cross_entropy_kernel)  # smaller tiles: the sums take the registers
PER_ROW = tuple(range(2, len(CROSS_ENTROPY.operands) - 1))


def prepare(
    input, target, weight, mask, smooth, temperature=1.0, softcap=0.0, mean=None, empty_nan=False, entropy=False,
    argmax=False,
):  # fmt: skip
    """Returns (results, arguments of row_plan.launch, its constants, its options). mean: True for the mean of all rows,
    False for their sum, None for each row's loss. entropy: the results are those of token_log_probs. argmax: they
    include the class of the largest logit."""
    has_probabilities, weighted = target.is_floating_point(), weight is not None
    dtype, compute = compute_dtype(input, target), compute_dtype(input, target, weight)
    row_stats = row_results(input, compute, 3 if entropy else count_stats(has_probabilities, weighted, smooth))
    if mean is not None:
        results, (loss, used) = reduced_results(input, dtype)
        written = loss, None, used
    elif entropy:
        results = (row_results(input, dtype, 3),)
        if argmax:
            results += row_results(input, torch.int64), row_results(input, torch.bool)
        best, correct = results[1:] or (None, None)
        written = [per_row(t, input) for t in (results[0][0], correct, best)]
    else:
        loss, keep = row_results(input, dtype), row_results(input, torch.bool)
        results = loss, keep, row_results(input, compute) if weighted and not has_probabilities else None
        written = [per_row(t, input) for t in results]
    tensors = (
        input,
        target if has_probabilities else None,
        *(per_row(t, input) for t in (None if has_probabilities else target, mask)),
        *written,
        per_row(row_stats[0], input),
        per_class(weight, input),
    )
    options = {"phases": SUM, "partials": SUMS.value, "per_row_math": True}
    if smooth and weighted:
        options["registers"] = (None, 255) if has_probabilities else (96 if compute == torch.float32 else 128, 160)
    elif entropy and (temperature, softcap) != (1.0, 0.0):
        options["registers"] = 128, None
    kernel = MANY_SUMS if smooth or has_probabilities else CROSS_ENTROPY
    plan = kernel, tensors, PER_ROW, input.shape, class_dim(input), compute
    constants = {"SMOOTH": smooth, "HAS_Q": has_probabilities, "WEIGHT": weighted, "ENTROPY": entropy, "ARGMAX": argmax}
    constants |= logits_kind(temperature, softcap) | reduction(mean, empty_nan) | {"count": row_stats[0].numel()}
    return (*results, row_stats), plan, constants, options


def cross_entropy(
    input, target, weight=None, mask=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, temperature=1.0,
    softcap=0.0,
):  # fmt: skip
    results, plan, constants, options = prepare(input, target, weight, mask, label_smoothing != 0, temperature, softcap)
    loss, keep, weights, row_stats = results
    if loss.numel():
        floats = label_smoothing, z_loss, ignore_index, *logits_numbers(temperature, softcap)
        launch("cross_entropy", *plan, floats, constants, **options)
    return loss, keep, loss.new_empty(0) if weights is None else weights, row_stats


def cross_entropy_reduced(
    input, target, weight=None, mask=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, temperature=1.0,
    softcap=0.0, mean=True, empty_nan=False,
):  # fmt: skip
    """Returns (the mean or sum of all rows, what a mean divides by, row_stats). There must be a row."""
    results, plan, constants, options = prepare(
        input, target, weight, mask, label_smoothing != 0, temperature, softcap, mean, empty_nan
    )
    floats = label_smoothing, z_loss, ignore_index, *logits_numbers(temperature, softcap)
    launch("cross_entropy", *plan, floats, constants, **options)
    return results

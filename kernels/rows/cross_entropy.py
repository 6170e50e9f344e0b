"""cross_entropy: loss = (1 - s) w_y (L - x_y) + s / A sum_c w_c (L - x_c) + z L^2 of each row, y its class, L = log sum
exp x, A how many classes are not of -inf. Of class probabilities q the first term is (1 - s) sum_c w_c q_c (L - x_c).

The numbers of a row that its backward needs are L in two parts, the largest logit and the rest, which beside a large
one would be lost, and where the call has them k and e:
dx_c = g ((k + 2 z L) p_c - e w_c - the own class's part), p_c = exp(x_c - L).
"""

import torch
import triton
import triton.language as tl

from ..engine.blocks import is_last
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.tile import store
from .classification import after, at_class, at_row, class_dim, class_of, count_numbers, per_class, per_row, row_numbers
from .cross_entropy_sums import SUMS, merge_partials, store_state, sum_range, widened
from .plan import SUM, launch
from .row import at_batch, declare, one_per_row, part_of, shift_of, tile_at


@triton.jit
def finish(
    state, kept, own_logit, w, smoothing, z_loss,
    SMOOTH: tl.constexpr, SHARES: tl.constexpr, WEIGHT: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """(loss, the two parts of L, k, e) of each row, in fp64.

    `kept` is asked first: of rows across memory it was loaded by one thread a row, and Triton then hands the sums to
    that thread. Else each thread would work out the logarithms of the eight rows that its access holds."""
    top, total, mass, own, count, every, moment = tl.tuple(
        [tl.where(kept, tl.expand_dims(s, ACROSS), 0.0).to(tl.float64) for s in state]
    )
    spread = tl.log(tl.where(total == 0, float("nan"), total))  # nothing but -inf: NaN, as torch has it
    certain = (top == float("inf")) & (total == 1) & (own_logit == top) & (z_loss == 0)
    certain = certain & (not SHARES) & (not SMOOTH)
    # +inf shows as NaN, but where it is the row's own logit, and that one alone
    shows = (top == float("inf")) & ~certain
    top, spread = tl.where(shows, float("nan"), top), tl.where(shows, float("nan"), spread)
    if SHARES:
        # (of an infinite mass the parts would be inf - inf)
        loss = tl.where(tl.abs(mass) < float("inf"), mass * spread - own, mass)
        factor = (1 - smoothing) * mass
    else:
        loss = tl.where(certain, 0.0, w * ((top - own_logit) + spread))
        factor = (1 - smoothing) * w
    even = smoothing
    if SMOOTH:
        even = smoothing / count
        every = every if WEIGHT else count
        loss = (1 - smoothing) * loss + even * (every * spread - moment)
        factor += even * every
    loss = tl.where(z_loss == 0, loss, loss + z_loss * (top + spread) * (top + spread))
    return loss, top, spread, factor, even


@triton.jit
def cross_entropy_kernel(
    x, shares, weight, target, mask, loss, keep, weights, numbers, partial, counter,
    smoothing, z_loss, ignore_index,
    outer_shape, inner_shape, x_outer, x_inner, shares_outer, shares_inner, weight_outer, weight_inner, target_outer,
    target_inner, mask_outer, mask_inner, loss_outer, loss_inner, keep_outer, keep_inner, weights_outer, weights_inner,
    numbers_outer, numbers_inner,
    batch_shape, x_batch, shares_batch, weight_batch, target_batch, mask_batch, loss_batch, keep_batch, weights_batch,
    numbers_batch,
    M, N, tiles, across, groups, splits, per_split, count,
    SMOOTH: tl.constexpr, X: tl.constexpr, SHARES: tl.constexpr, WEIGHT: tl.constexpr, TARGET: tl.constexpr,
    MASK: tl.constexpr, LOSS: tl.constexpr, KEEP: tl.constexpr, WEIGHTS: tl.constexpr, NUMBERS: tl.constexpr,
    PEEL: tl.constexpr, AXIS: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr, LONG: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, LM: tl.constexpr, LN: tl.constexpr, VEC: tl.constexpr,
    C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """count: of rows, which is how far apart the kinds of numbers are."""
    ACROSS: tl.constexpr = 1 if AXIS == INNER else 0
    BO: tl.constexpr = BM if AXIS == INNER else BN
    split, group, batch, block = part_of(splits, across, I)
    space = (M, N, outer_shape, inner_shape)
    xs = at_batch(x, x_outer, x_inner, x_batch, batch, batch_shape)
    qs = at_batch(shares, shares_outer, shares_inner, shares_batch, batch, batch_shape)
    ws = (weight, weight_outer, weight_inner)  # of classes alone
    targets = at_batch(target, target_outer, target_inner, target_batch, batch, batch_shape)
    masks = at_batch(mask, mask_outer, mask_inner, mask_batch, batch, batch_shape)
    losses = at_batch(loss, loss_outer, loss_inner, loss_batch, batch, batch_shape)
    keeps = at_batch(keep, keep_outer, keep_inner, keep_batch, batch, batch_shape)
    found = at_batch(weights, weights_outer, weights_inner, weights_batch, batch, batch_shape)
    tops = at_batch(numbers, numbers_outer, numbers_inner, numbers_batch, batch, batch_shape)
    if PEEL:
        space = (M, N, outer_shape, inner_shape, shift_of(xs, block, outer_shape, VEC, I))
    m, n = tile_at(space, block, 0, AXIS, BM, BN, VEC, I)

    first = split * per_split
    last = tl.minimum(first + per_split, tiles)
    if AXIS == INNER and not WHOLE and not SPLIT:  # a row that is not kept is not read, if it has tiles to wait for
        kept = class_of(space, targets, masks, ws, ignore_index, m, n, TARGET, MASK, WEIGHT, False, AXIS, C, I)[1]
        last = tl.where(tl.max(tl.max(kept.to(tl.int32), 1), 0) > 0, last, first)
    state = sum_range(
        first, last, block, space, xs, qs, ws,
        SMOOTH, X, SHARES, WEIGHT, AXIS, LONG, BM, BN, LM, LN, VEC, C, I,
    )  # fmt: skip
    finished = True
    if SPLIT:
        rows = groups.to(I) * BO
        output = group * BO + tl.arange(0, BO).to(I)
        state = widened(state)
        store_state(partial + split * rows + output, splits * rows, state, SMOOTH, SHARES)
        finished = is_last(counter + group, splits)
    if finished:
        if SPLIT:
            state = merge_partials(partial, splits, output, rows, SMOOTH, SHARES, WEIGHT, BS, BO, C)
        place, kept, w = class_of(
            space, targets, masks, ws, ignore_index, m, n, TARGET, MASK, WEIGHT, False, AXIS, C, I
        )
        own_logit = w.to(tl.float64)
        if TARGET:
            where = xs[0] + at_row(space, xs, m, n, AXIS) + at_class(tl.where(kept, place, 0), space, xs, AXIS)
            own_logit = tl.load(where, mask=kept, other=0).to(tl.float64)
        value, top, spread, factor, even = finish(
            state, kept, own_logit, w.to(tl.float64), smoothing, z_loss, SMOOTH, SHARES, WEIGHT, ACROSS
        )
        inside = one_per_row(space, m, n, AXIS)
        some = kept & ((N if AXIS == INNER else M) > 0)  # of no classes the loss is 0
        store(losses, space, m, n, tl.where(some, value, 0.0), inside, LOSS, True)
        store(keeps, space, m, n, kept, inside, KEEP, True)
        if WEIGHTS:
            store(found, space, m, n, tl.where(kept, w, 0.0), inside, WEIGHTS, True)
        store(tops, space, m, n, tl.where(some, top, 0.0), inside, NUMBERS, True)
        nexts = after(tops, count)
        store(nexts, space, m, n, tl.where(some, spread, 0.0), inside, NUMBERS, True)
        if SHARES or (WEIGHT and SMOOTH):
            nexts = after(nexts, count)
            store(nexts, space, m, n, tl.where(some, factor, 0.0), inside, NUMBERS, True)
        if SMOOTH:
            store(after(nexts, count), space, m, n, tl.where(some, even, 0.0), inside, NUMBERS, True)


OPERANDS = ("x", "shares", "weight", "target", "mask", "loss", "keep", "weights", "numbers")
CROSS_ENTROPY = declare(
    cross_entropy_kernel, OPERANDS, "SMOOTH", floats=("smoothing", "z_loss", "ignore_index"), indices=("count",)
)
PER_ROW = tuple(range(3, len(OPERANDS)))


def prepare(input, target, weight, mask, smooth):
    """(results, what a plan takes, its constants, its options)."""
    shares, weighted = target.is_floating_point(), weight is not None
    dtype, compute = compute_dtype(input, target), compute_dtype(input, target, weight)
    loss, keep = row_numbers(input, dtype), row_numbers(input, torch.bool)
    weights = row_numbers(input, compute) if weighted and not shares else None
    numbers = row_numbers(input, compute, count_numbers(shares, weighted, smooth))
    tensors = (
        input,
        target if shares else None,
        per_class(weight, input),
        *(per_row(t, input) for t in (None if shares else target, mask, loss, keep, weights, numbers[0])),
    )
    options = {"phases": SUM, "partials": SUMS.value, "heads": True}
    if smooth and weighted:
        options["registers"] = (None, 255) if shares else (96 if compute == torch.float32 else 128, 160)
    plan = CROSS_ENTROPY, tensors, PER_ROW, input.shape, class_dim(input), compute
    return (loss, keep, weights, numbers), plan, {"SMOOTH": smooth, "count": loss.numel()}, options


def cross_entropy(input, target, weight=None, mask=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0):
    results, plan, constants, options = prepare(input, target, weight, mask, label_smoothing != 0)
    loss, keep, weights, numbers = results
    if loss.numel():
        launch("cross_entropy", *plan, (label_smoothing, z_loss, ignore_index), constants, **options)
    return loss, keep, loss.new_empty(0) if weights is None else weights, numbers

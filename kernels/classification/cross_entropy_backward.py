"""The backward of cross_entropy. No row is summed: a block takes one tile. With p_c = exp(x_c - L), the slope of L:

(1) (1 - s) w_y (L - x_y) has the slope (1 - s) w_y p_c - own part; the own part is (1 - s) w_y at c = y, else 0.
    For probabilities it is (1 - s) W p_c - own part, W = sum_c w_c q_c; the own part is (1 - s) w_c q_c.
(2) s / A sum_c w_c (L - x_c) has the slope e S p_c - e w_c, with e = s / A and S = sum_c w_c.
(3) z L^2 has the slope 2 z L p_c.
(4) Together, with k = (1 - s) (w_y or W) + e S: dx_c = g ((k + 2 z L) p_c - e w_c - own part).

The row_stats have L in two parts, k and e. The gradient of the probabilities is dq_c = g (1 - s) w_c (L - x_c).

For token_log_probs (ENTROPY) a row has three upstream gradients: a for its log probability, b for its entropy H, l for
L. Then dx_c = p_c (l - a - b (log p_c + H)), plus a at the row's class. Without logits this is the backward of
nll_loss, which is the own part alone.
"""

import torch
import triton
import triton.language as tl

from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.math import exponential
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import declare, part_of, peeled, store_tile, tile_at
from ..engine.row_loss import class_dim, class_of, count_stats, fetch_stat, per_class, per_row, row_shape
from ..engine.row_plan import MAP, launch
from ..engine.tile import fetch, in_batch, within
from .logits import AS_THEY_ARE, logits_kind, logits_numbers, shaped

CrossEntropyBackwardConfig = constants("SMOOTH ENTROPY LOGITS PARTIAL PEEL AXIS BM BN VEC C I")


@triton.jit
def cross_entropy_backward_kernel(
    x: Operand, probabilities: Operand, target: Operand, mask: Operand, grad: Operand, row_stats: Operand, dx: Operand,
    dq: Operand, weight: Operand, denominator: Operand, smoothing: tl.float64, z_loss: tl.float64,
    ignore_index: tl.float64, parameters: tl.float64, count: tl.tensor, space: Space, parts: Parts,
    config: CrossEntropyBackwardConfig,
):  # fmt: skip
    """count: the number of rows, and the distance between the numbers of a row in row_stats (ENTROPY: and in grad)."""
    C: tl.constexpr = config.C
    SMOOTH: tl.constexpr = config.SMOOTH
    HAS_Q: tl.constexpr = probabilities is not None
    WEIGHT: tl.constexpr = weight is not None
    t, _, batch, block = part_of(parts.tiles, parts.across, config.I)
    space = in_batch(space, batch, (x, probabilities, target, mask, grad, row_stats, dx, dq))
    if config.PEEL:
        space = peeled(space, x if x is not None else dx, block, config)
    m, n = tile_at(space, block, t, config)
    edge, nowhere = within(space, m, n), tl.zeros([1, 1], tl.int1)
    if x is not None:
        v, slope = shaped(fetch(x, space, m, n, edge, True).to(C), parameters, config.LOGITS)  # (BM, BN)
    if HAS_Q:
        q = fetch(probabilities, space, m, n, edge, True).to(C)  # (BM, BN)
    per_class = 1.0
    if WEIGHT and (HAS_Q or SMOOTH):
        per_class = fetch(weight, space, m, n, edge, True).to(C)

    # per row: g (k + 2 z L), g (1 - s) w_y, g e: (BM, 1), or (1, BN) for rows across memory
    class_index, kept, w = class_of(target, mask, weight, ignore_index, space, m, n, config, config.PARTIAL)
    if denominator is None:
        g = fetch(grad, space, m, n, nowhere, True).to(C)
    else:  # one grad for all rows
        g = tl.full([1, 1], tl.load(grad.pointer).to(C) / tl.load(denominator.pointer).to(C), C)
    if not WEIGHT or HAS_Q:
        w = tl.full([1, 1], 1.0, C)
    target_factor = g * (tl.full([1, 1], 1 - smoothing, C) * w)
    if x is not None:
        high = fetch(row_stats, space, m, n, nowhere, True)  # L = high + low
        next_stat = count.to(tl.int64)
        low = fetch_stat(row_stats, next_stat, space, m, n)
        # L = +inf only where the logit of the row's class is the only +inf. The loss and its gradient are 0 then.
        kept &= high != float("inf")
        factor = w
        if HAS_Q or (WEIGHT and SMOOTH):
            next_stat += count
            factor = fetch_stat(row_stats, next_stat, space, m, n)  # k
        high, low = high.to(C), low.to(C)
        twice = tl.full([1, 1], 2 * z_loss, C)
        factor = tl.where(twice == 0, factor.to(C), factor.to(C) + twice * (high + low))
        factor = g * factor * exponential(-low)
        if SMOOTH:
            next_stat += count
            uniform = fetch_stat(row_stats, next_stat, space, m, n)  # e
            uniform = g * uniform.to(C)
        if config.ENTROPY:
            next_stat, next_grad = 2 * next_stat, count.to(tl.int64)
            of_entropy, of_sum = (
                fetch_stat(grad, next_grad, space, m, n).to(C),
                fetch_stat(grad, 2 * next_grad, space, m, n).to(C),
            )
            offset = low - fetch_stat(row_stats, next_stat, space, m, n).to(C)
            target_factor = -g
            factor = (of_sum - g) * exponential(-low)
            of_entropy *= exponential(-low)
    if dx is not None:
        value = tl.zeros([config.BM, config.BN], C)
        if x is not None:
            p = exponential(v - high)  # p_c exp(low)
            if config.ENTROPY:  # (where p_c is 0, log p_c is -inf)
                factor -= tl.where(p == 0, 0.0, of_entropy * ((v - high) - offset))
            value = factor * p  # g (k + 2 z L) p_c
            if SMOOTH:
                value -= tl.where(v != float("-inf"), uniform * per_class, 0.0)  # g e w_c
        if HAS_Q:
            value -= target_factor * (q * per_class)  # g (1 - s) w_c q_c
        else:
            value -= tl.where((n[None, :] if config.AXIS == INNER else m[:, None]) == class_index, target_factor, 0.0)
        if config.LOGITS != AS_THEY_ARE:
            value *= slope
        store_tile(dx, space, block, t, m, n, tl.where(kept, value, 0.0), config)
    if dq is not None:
        # a class with a logit of -inf and w q = 0 does not exist
        nothing = (v == float("-inf")) & (q * per_class == 0)
        slope = tl.where(nothing, 0.0, per_class * ((high - v) + low))  # w_c (L - x_c)
        value = tl.where(kept, target_factor * slope, 0.0)
        store_tile(dq, space, block, t, m, n, value, config)


CROSS_ENTROPY_BACKWARD = declare(
    cross_entropy_backward_kernel,
    tile_bytes=16384,  # four accesses a thread: the arithmetic per row takes as long as eight elements
)
PER_ROW = (2, 3, 4, 5, 9)
OPTIONS = {"phases": MAP, "per_row_math": True}


def prepare(
    grad, input, target, row_stats, weight, mask, smooth, partial, dx, dq, denominator=None, temperature=1.0,
    softcap=0.0, entropy=False,
):  # fmt: skip
    """Returns (arguments of row_plan.launch, its constants). input, row_stats: None for nll_loss, where dx has the
    shape. grad, row_stats: only the first number of each row, where a row has several."""
    like = dx if input is None else input
    has_probabilities = target.is_floating_point()
    tensors = (
        input,
        target if has_probabilities else None,
        *(per_row(t, like) for t in (None if has_probabilities else target, mask, grad, row_stats)),
        dx,
        dq,
        per_class(weight, like),
        per_row(denominator, like),
    )
    compute = compute_dtype(like, target, weight, grad)
    plan = CROSS_ENTROPY_BACKWARD, tensors, PER_ROW, like.shape, class_dim(like), compute
    constants = {"SMOOTH": smooth, "ENTROPY": entropy, "PARTIAL": partial, **logits_kind(temperature, softcap)}
    return plan, constants | {"count": (grad if row_stats is None else row_stats).numel()}


def check_stats(row_stats, many, input):
    shape, dtype = tuple(row_stats.shape), row_stats.dtype
    fits = shape == (many, *row_shape(input)) and row_stats.is_contiguous()
    if not fits or dtype not in (torch.float32, torch.float64):
        raise ValueError(f"cross_entropy_backward: row_stats {shape} of {dtype} are not those of the forward")


def cross_entropy_backward(
    grad, input, target, row_stats, weight=None, mask=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
    temperature=1.0, softcap=0.0, need_input=True, need_target=False, partial=False, denominator=None, dx=None,
):  # fmt: skip
    """grad: one number per row; 0-dim for the sum or mean of all rows. denominator: what the mean divides by, or None.
    dx: the output; None: a new tensor."""
    dx = torch.empty_like(input) if need_input and dx is None else dx
    dq = torch.empty_like(target) if need_target else None
    check_stats(row_stats, count_stats(target.is_floating_point(), weight is not None, label_smoothing != 0), input)
    if input.numel() and (need_input or need_target):
        plan, constants = prepare(
            grad, input, target, row_stats[0], weight, mask, label_smoothing != 0, partial, dx, dq, denominator,
            temperature, softcap,
        )  # fmt: skip
        floats = label_smoothing, z_loss, ignore_index, *logits_numbers(temperature, softcap)
        launch("cross_entropy_backward", *plan, floats, constants, **OPTIONS)
    return tuple(input.new_empty(0) if d is None else d for d in (dx, dq))


def cross_entropy_overwrite(grad, logits, *options):
    """Writes the gradient over the logits: each thread has read the elements that it writes."""
    cross_entropy_backward(grad, logits, *options, dx=logits)


def cross_entropy_reduced_backward(
    grad, denominator, input, target, row_stats, weight=None, mask=None, ignore_index=-100, label_smoothing=0.0,
    z_loss=0.0, temperature=1.0, softcap=0.0, need_input=True, need_target=False,
):  # fmt: skip
    options = ignore_index, label_smoothing, z_loss, temperature, softcap, need_input, need_target, False, denominator
    return cross_entropy_backward(grad, input, target, row_stats, weight, mask, *options)

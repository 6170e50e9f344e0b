"""The backward of cross_entropy: dx_c = g ((k + 2 z L) p_c - e w_c - own part), p_c = exp(x_c - L), from the numbers of
each row: two of L, k, e. The own part is (1 - s) w_y of the row's class alone, or of probabilities (1 - s) w_c q_c;
dq_c = g (1 - s) w_c (L - x_c). No row is summed: a block takes one tile.

Without logits it is the backward of nll_loss, which is the own part alone.
"""

import torch
import triton
import triton.language as tl

from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.math import exponential
from ..engine.tile import fetch, within
from .classification import after, class_dim, class_of, count_numbers, per_class, per_row, row_shape
from .plan import MAP, launch
from .row import at_batch, declare, part_of, shift_of, store_tile, tile_at


@triton.jit
def cross_entropy_backward_kernel(
    x, shares, weight, target, mask, grad, numbers, dx, dq,
    smoothing, z_loss, ignore_index,
    outer_shape, inner_shape, x_outer, x_inner, shares_outer, shares_inner, weight_outer, weight_inner, target_outer,
    target_inner, mask_outer, mask_inner, grad_outer, grad_inner, numbers_outer, numbers_inner, dx_outer, dx_inner,
    dq_outer, dq_inner,
    batch_shape, x_batch, shares_batch, weight_batch, target_batch, mask_batch, grad_batch, numbers_batch, dx_batch,
    dq_batch,
    M, N, tiles, across, count,
    SMOOTH: tl.constexpr, PARTIAL: tl.constexpr, X: tl.constexpr, SHARES: tl.constexpr, WEIGHT: tl.constexpr,
    TARGET: tl.constexpr, MASK: tl.constexpr, GRAD: tl.constexpr, NUMBERS: tl.constexpr, DX: tl.constexpr,
    DQ: tl.constexpr, PEEL: tl.constexpr, AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, VEC: tl.constexpr,
    C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """count: of rows, which is how far apart the kinds of numbers are."""
    t, _, batch, block = part_of(tiles, across, I)
    space = (M, N, outer_shape, inner_shape)
    xs = at_batch(x, x_outer, x_inner, x_batch, batch, batch_shape)
    qs = at_batch(shares, shares_outer, shares_inner, shares_batch, batch, batch_shape)
    ws = (weight, weight_outer, weight_inner)  # of classes alone
    targets = at_batch(target, target_outer, target_inner, target_batch, batch, batch_shape)
    masks = at_batch(mask, mask_outer, mask_inner, mask_batch, batch, batch_shape)
    gs = at_batch(grad, grad_outer, grad_inner, grad_batch, batch, batch_shape)
    found = at_batch(numbers, numbers_outer, numbers_inner, numbers_batch, batch, batch_shape)
    dxs = at_batch(dx, dx_outer, dx_inner, dx_batch, batch, batch_shape)
    dqs = at_batch(dq, dq_outer, dq_inner, dq_batch, batch, batch_shape)
    if PEEL:
        space = (M, N, outer_shape, inner_shape, shift_of(xs if X else dxs, block, outer_shape, VEC, I))
    m, n = tile_at(space, block, t, AXIS, BM, BN, VEC, I)
    edge, nowhere = within(space, m, n), tl.zeros([1, 1], tl.int1)
    if X:
        v = fetch(xs, space, m, n, edge, X, True).to(C)
    if SHARES:
        q = fetch(qs, space, m, n, edge, SHARES, True).to(C)
    per_class = 1.0
    if WEIGHT and (SHARES or SMOOTH):
        per_class = fetch(ws, space, m, n, edge, WEIGHT, True).to(C)

    # of each row, in fp64: g (k + 2 z L), g (1 - s) w_y, g e
    place, kept, w = class_of(space, targets, masks, ws, ignore_index, m, n, TARGET, MASK, WEIGHT, PARTIAL, AXIS, C, I)
    g = fetch(gs, space, m, n, nowhere, GRAD, True).to(tl.float64)
    w = w.to(tl.float64)
    if not WEIGHT or SHARES:
        w = 1.0
    own = (g * (1 - smoothing) * w).to(C)
    if X:
        high = fetch(found, space, m, n, nowhere, NUMBERS, True)
        found = after(found, count)
        low = fetch(found, space, m, n, nowhere, NUMBERS, True)
        # +inf: the row's own logit, which alone is it. The loss is 0, and its gradient.
        kept &= high != float("inf")
        factor = w
        if SHARES or (WEIGHT and SMOOTH):
            found = after(found, count)
            factor = fetch(found, space, m, n, nowhere, NUMBERS, True)
        factor = tl.where(z_loss == 0, factor, factor + 2 * z_loss * (high.to(tl.float64) + low))
        high, low = high.to(C), low.to(C)
        factor = (g * factor).to(C) * exponential(-low)
        if SMOOTH:
            even = fetch(after(found, count), space, m, n, nowhere, NUMBERS, True)
            even = (g * even).to(C)
    if DX:
        value = tl.zeros([BM, BN], C)
        if X:
            value = factor * exponential(v - high)
            if SMOOTH:
                value -= tl.where(v != float("-inf"), even * per_class, 0.0)
        if SHARES:
            value -= own * (q * per_class)
        else:
            value -= tl.where((n[None, :] if AXIS == INNER else m[:, None]) == place, own, 0.0)
        store_tile(dxs, space, block, t, m, n, tl.where(kept, value, 0.0), DX, AXIS, BM, BN)
    if DQ:
        # a class of -inf without a share does not exist
        nothing = (v == float("-inf")) & (q * per_class == 0)
        slope = tl.where(nothing, 0.0, per_class * ((high - v) + low))
        value = tl.where(kept, own * slope, 0.0)
        store_tile(dqs, space, block, t, m, n, value, DQ, AXIS, BM, BN)


OPERANDS = ("x", "shares", "weight", "target", "mask", "grad", "numbers", "dx", "dq")
CROSS_ENTROPY_BACKWARD = declare(
    cross_entropy_backward_kernel, OPERANDS, "SMOOTH", "PARTIAL", split=False,
    floats=("smoothing", "z_loss", "ignore_index"), indices=("count",),
    tile_bytes=16384,  # four accesses a thread: what is worked out for a row takes as long as eight elements
)  # fmt: skip
PER_ROW = tuple(range(3, 7))
OPTIONS = {"phases": MAP, "heads": True}


def prepare(grad, input, target, numbers, weight, mask, smooth, partial, dx, dq):
    """(what a plan takes, its constants). input, numbers: None for nll_loss, of whose dx the shape is then."""
    like = dx if input is None else input
    shares = target.is_floating_point()
    tensors = (
        input,
        target if shares else None,
        per_class(weight, like),
        *(per_row(t, like) for t in (None if shares else target, mask, grad, numbers)),
        dx,
        dq,
    )
    compute = compute_dtype(like, target, weight, grad)
    plan = CROSS_ENTROPY_BACKWARD, tensors, PER_ROW, like.shape, class_dim(like), compute
    return plan, {"SMOOTH": smooth, "PARTIAL": partial, "count": grad.numel()}


def cross_entropy_backward(
    grad, input, target, numbers, weight=None, mask=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
    need_input=True, need_target=False, partial=False,
):  # fmt: skip
    dx = torch.empty_like(input) if need_input else None
    dq = torch.empty_like(target) if need_target else None
    many = count_numbers(target.is_floating_point(), weight is not None, label_smoothing != 0)
    if (
        numbers.dtype not in (torch.float32, torch.float64)
        or numbers.shape != (many, *row_shape(input))
        or not numbers.is_contiguous()
    ):
        raise ValueError(
            f"cross_entropy_backward: numbers {tuple(numbers.shape)} of {numbers.dtype} are not those of the forward"
        )
    if input.numel() and (need_input or need_target):
        plan, constants = prepare(
            grad, input, target, numbers[0], weight, mask, label_smoothing != 0, partial, dx, dq
        )  # fmt: skip
        launch("cross_entropy_backward", *plan, (label_smoothing, z_loss, ignore_index), constants, **OPTIONS)
    return tuple(input.new_empty(0) if d is None else d for d in (dx, dq))

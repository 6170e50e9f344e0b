"""nll_loss: -w_y x_y of each row, y its class. Its backward is that of cross_entropy without logits."""

import torch
import triton
import triton.language as tl

from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.tile import store
from .classification import at_class, at_row, class_dim, class_of, per_class, per_row, row_numbers
from .cross_entropy_backward import OPTIONS as BACKWARD
from .cross_entropy_backward import prepare as prepare_backward
from .plan import PICK, launch
from .row import at_batch, declare, one_per_row, part_of, tile_at


@triton.jit
def nll_loss_kernel(
    x, weight, target, mask, loss, keep, weights,
    ignore_index,
    outer_shape, inner_shape, x_outer, x_inner, weight_outer, weight_inner, target_outer, target_inner, mask_outer,
    mask_inner, loss_outer, loss_inner, keep_outer, keep_inner, weights_outer, weights_inner,
    batch_shape, x_batch, weight_batch, target_batch, mask_batch, loss_batch, keep_batch, weights_batch,
    M, N, tiles, across,
    X: tl.constexpr, WEIGHT: tl.constexpr, TARGET: tl.constexpr, MASK: tl.constexpr, LOSS: tl.constexpr,
    KEEP: tl.constexpr, WEIGHTS: tl.constexpr, AXIS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    VEC: tl.constexpr, C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    _, _, batch, block = part_of(1, across, I)
    space = (M, N, outer_shape, inner_shape)
    xs = at_batch(x, x_outer, x_inner, x_batch, batch, batch_shape)
    targets = at_batch(target, target_outer, target_inner, target_batch, batch, batch_shape)
    masks = at_batch(mask, mask_outer, mask_inner, mask_batch, batch, batch_shape)
    losses = at_batch(loss, loss_outer, loss_inner, loss_batch, batch, batch_shape)
    keeps = at_batch(keep, keep_outer, keep_inner, keep_batch, batch, batch_shape)
    found = at_batch(weights, weights_outer, weights_inner, weights_batch, batch, batch_shape)
    m, n = tile_at(space, block, 0, AXIS, BM, BN, 1, I)
    ws = (weight, weight_outer, weight_inner)
    place, kept, w = class_of(space, targets, masks, ws, ignore_index, m, n, TARGET, MASK, WEIGHT, False, AXIS, C, I)
    where = xs[0] + at_row(space, xs, m, n, AXIS) + at_class(tl.where(kept, place, 0), space, xs, AXIS)
    value = -tl.load(where, mask=kept, other=0).to(C)
    if WEIGHT:
        value *= w
    inside = one_per_row(space, m, n, AXIS)
    store(losses, space, m, n, tl.where(kept, value, 0.0), inside, LOSS, True)
    store(keeps, space, m, n, kept, inside, KEEP, True)
    if WEIGHTS:
        store(found, space, m, n, tl.where(kept, w, 0.0), inside, WEIGHTS, True)


OPERANDS = ("x", "weight", "target", "mask", "loss", "keep", "weights")
NLL_LOSS = declare(nll_loss_kernel, OPERANDS, split=False, floats=("ignore_index",))
PER_ROW = tuple(range(2, len(OPERANDS)))


def prepare(input, target, weight, mask):
    """(results, what a plan takes)."""
    loss, keep = row_numbers(input, compute_dtype(input)), row_numbers(input, torch.bool)
    weights = None if weight is None else row_numbers(input, compute_dtype(input, weight))
    rows = (per_row(t, input) for t in (target, mask, loss, keep, weights))
    tensors = input, per_class(weight, input), *rows
    return (loss, keep, weights), (
        NLL_LOSS, tensors, PER_ROW, input.shape, class_dim(input), compute_dtype(input, weight)
    )  # fmt: skip


def nll_loss(input, target, weight=None, mask=None, ignore_index=-100):
    (loss, keep, weights), plan = prepare(input, target, weight, mask)
    if loss.numel():
        launch("nll_loss", *plan, (ignore_index,), phases=PICK)
    return loss, keep, loss.new_empty(0) if weights is None else weights


def nll_loss_backward(grad, size, dtype, target, weight=None, mask=None, ignore_index=-100):
    dx = empty(tuple(size), dtype, grad.device)
    if dx.numel():
        plan, constants = prepare_backward(grad, None, target, None, weight, mask, False, False, dx, None)
        launch("nll_loss_backward", *plan, (0.0, 0.0, ignore_index), constants, **BACKWARD)
    return dx

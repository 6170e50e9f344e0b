"""nll_loss: -w_y x_y of each row, y its class. Its backward is that of cross_entropy without logits."""

import torch
import triton
import triton.language as tl

from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.operand import Operand, Parts, Space
from ..engine.tile import in_batch, store
from .classification import class_dim, class_of, own_class, per_class, per_row, row_results
from .cross_entropy_backward import OPTIONS as BACKWARD
from .cross_entropy_backward import prepare as prepare_backward
from .plan import PICK, launch
from .row import TileConfig, declare, one_per_row, part_of, tile_at


@triton.jit
def nll_loss_kernel(
    x: Operand, target: Operand, mask: Operand, loss: Operand, keep: Operand, weights: Operand, weight: Operand,
    ignore_index: tl.float64, space: Space, parts: Parts, config: TileConfig,
):  # fmt: skip
    _, _, batch, block = part_of(1, parts.across, config.I)
    space = in_batch(space, batch, (x, target, mask, loss, keep, weights))
    m, n = tile_at(space, block, 0, config)
    # one number a row: (BM, 1), or of rows across memory (1, BN)
    place, kept, w = class_of(target, mask, weight, ignore_index, space, m, n, config)
    pointer = own_class(tl.where(kept, place, 0), x, space, m, n, config)
    value = -tl.load(pointer, mask=kept, other=0).to(config.C)  # -x_y
    if weight is not None:
        value *= w
    inside = one_per_row(space, m, n, config)
    store(loss, space, m, n, tl.where(kept, value, 0.0), inside, True)
    store(keep, space, m, n, kept, inside, True)
    if weights is not None:
        store(weights, space, m, n, tl.where(kept, w, 0.0), inside, True)


NLL_LOSS = declare(nll_loss_kernel)
PER_ROW = tuple(range(1, len(NLL_LOSS.operands) - 1))


def prepare(input, target, weight, mask):
    """(results, what a plan takes)."""
    loss, keep = row_results(input, compute_dtype(input)), row_results(input, torch.bool)
    weights = None if weight is None else row_results(input, compute_dtype(input, weight))
    rows = (per_row(t, input) for t in (target, mask, loss, keep, weights))
    tensors = input, *rows, per_class(weight, input)
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

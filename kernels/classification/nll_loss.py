"""nll_loss: -w_y x_y of each row, y its class. Its backward is that of cross_entropy without logits."""

import torch
import triton
import triton.language as tl

from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import declare, one_per_row, part_of, tile_at
from ..engine.row_loss import (
    add_up,
    class_dim,
    class_of,
    own_class,
    per_class,
    per_row,
    reduced_results,
    reduction,
    row_results,
)
from ..engine.row_plan import PICK, launch
from ..engine.tile import in_batch, store
from .cross_entropy_backward import OPTIONS as BACKWARD
from .cross_entropy_backward import prepare as prepare_backward

NLLLossConfig = constants("REDUCE EMPTY_NAN AXIS BM BN VEC C I")


@triton.jit
def nll_loss_kernel(
    x: Operand, target: Operand, mask: Operand, loss: Operand, keep: Operand, weights: Operand, weight: Operand,
    partial: tl.pointer_type, counter: tl.pointer_type, ignore_index: tl.float64, space: Space, parts: Parts,
    config: NLLLossConfig,
):  # fmt: skip
    """Writes each row's loss, keep and weight. REDUCE: `loss` is the sum or mean of all rows, `weights` its divisor."""
    _, group, batch, block = part_of(1, parts.across, config.I)
    space = in_batch(space, batch, (x, target, mask, loss, keep, weights))
    m, n = tile_at(space, block, 0, config)
    # one number per row: (BM, 1), or (1, BN) for rows across memory
    class_index, kept, w = class_of(target, mask, weight, ignore_index, space, m, n, config)
    pointer = own_class(tl.where(kept, class_index, 0), x, space, m, n, config)
    value = -tl.load(pointer, mask=kept, other=0).to(config.C)  # -x_y
    if weight is not None:
        value *= w
    value, w = tl.where(kept, value, 0.0), tl.where(kept, w, 0.0)
    if config.REDUCE:
        add_up(value, kept, w, loss, weights, partial, counter, group, parts.groups, config, weight is not None)
    else:
        inside = one_per_row(space, m, n, config)
        store(loss, space, m, n, value, inside, True)
        store(keep, space, m, n, kept, inside, True)
        if weights is not None:
            store(weights, space, m, n, w, inside, True)


NLL_LOSS = declare(nll_loss_kernel)
PER_ROW = tuple(range(1, len(NLL_LOSS.operands) - 1))


def prepare(input, target, weight, mask, mean=None, empty_nan=False):
    """Returns (results, arguments of row_plan.launch, its constants). mean: as in cross_entropy.prepare."""
    dtype, compute = compute_dtype(input), compute_dtype(input, weight)
    if mean is None:
        weights = None if weight is None else row_results(input, compute)
        results = row_results(input, dtype), row_results(input, torch.bool), weights
        written = [per_row(t, input) for t in results]
    else:
        results, (loss, used) = reduced_results(input, dtype)
        written = loss, None, used
    tensors = input, *(per_row(t, input) for t in (target, mask)), *written, per_class(weight, input)
    plan = NLL_LOSS, tensors, PER_ROW, input.shape, class_dim(input), compute
    return results, plan, reduction(mean, empty_nan)


def nll_loss(input, target, weight=None, mask=None, ignore_index=-100):
    (loss, keep, weights), plan, constants = prepare(input, target, weight, mask)
    if loss.numel():
        launch("nll_loss", *plan, (ignore_index,), constants, phases=PICK)
    return loss, keep, loss.new_empty(0) if weights is None else weights


def nll_loss_reduced(input, target, weight=None, mask=None, ignore_index=-100, mean=True, empty_nan=False):
    """Returns (the mean or sum of all rows, what a mean divides by). There must be a row."""
    results, plan, constants = prepare(input, target, weight, mask, mean, empty_nan)
    launch("nll_loss", *plan, (ignore_index,), constants, phases=PICK)
    return results


def nll_loss_backward(grad, size, dtype, target, weight=None, mask=None, ignore_index=-100, denominator=None):
    """grad: one number per row; 0-dim for the sum or mean of all rows. denominator: a mean's divisor, or None."""
    dx = empty(tuple(size), dtype, grad.device)
    if dx.numel():
        plan, constants = prepare_backward(grad, None, target, None, weight, mask, False, False, dx, None, denominator)
        launch("nll_loss_backward", *plan, (0.0, 0.0, ignore_index), constants, **BACKWARD)
    return dx


def nll_loss_reduced_backward(grad, denominator, *operands):
    return nll_loss_backward(grad, *operands, denominator)

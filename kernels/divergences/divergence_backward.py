"""The backward of the divergences: dx = g (q h - q sum q h) / T, dy = g (p f - p sum p f) / T. No row is summed: a
block takes one tile."""

import triton
import triton.language as tl

from ..engine.elementwise import compute_dtype
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import declare, one_per_row, part_of, store_tile, tile_at
from ..engine.row_loss import fetch_stat
from ..engine.row_plan import MAP, launch
from ..engine.tensors import like
from ..engine.tile import fetch, in_batch, within
from .divergence import JS, KL, TV, check_row_stats, per_row, read, terms

DivergenceBackwardConfig = constants("OP AXIS BM BN VEC C I")


@triton.jit
def divergence_backward_kernel(
    x: Operand, y: Operand, keep: Operand, grad: Operand, row_stats: Operand, dx: Operand, dy: Operand,
    parameters: tl.float64, count: tl.tensor, space: Space, parts: Parts, config: DivergenceBackwardConfig,
):  # fmt: skip
    C: tl.constexpr = config.C
    t, _, batch, block = part_of(parts.tiles, parts.across, config.I)
    space = in_batch(space, batch, (x, y, keep, grad, row_stats, dx, dy))
    m, n = tile_at(space, block, t, config)
    edge, nowhere, next_number = within(space, m, n), tl.zeros([1, 1], tl.int1), count.to(tl.int64)
    # per row: (BM, 1), or (1, BN) for rows across memory
    kept = one_per_row(space, m, n, config)
    if keep is not None:
        kept &= fetch(keep, space, m, n, nowhere, True)
    scale = tl.full([1, 1], parameters[0], C)
    g = fetch(grad, space, m, n, nowhere, True).to(C) * scale
    max_x = fetch(row_stats, space, m, n, nowhere, True).to(C)
    log_total_x = fetch_stat(row_stats, next_number, space, m, n).to(C)
    max_y = fetch_stat(row_stats, 2 * next_number, space, m, n).to(C)
    log_total_y = fetch_stat(row_stats, 3 * next_number, space, m, n).to(C)
    v = (read(x, space, m, n, edge, config) - max_x) * scale - log_total_x
    u = (read(y, space, m, n, edge, config) - max_y) * scale - log_total_y
    _, of_y, of_x, p, q = terms(u, v, tl.full([1, 1], parameters[1], C), config.OP)
    if dx is not None:
        mean = fetch_stat(row_stats, 4 * next_number, space, m, n).to(C)
        value = g * (of_x - tl.where(q == 0, 0.0, q * mean))
        store_tile(dx, space, block, t, m, n, tl.where(kept, value, 0.0), config)
    if dy is not None:
        mean = fetch_stat(row_stats, 5 * next_number, space, m, n).to(C)
        value = g * (of_y - tl.where(p == 0, 0.0, p * mean))
        store_tile(dy, space, block, t, m, n, tl.where(kept, value, 0.0), config)


DIVERGENCE_BACKWARD = declare(  # (the tile size is that of cross_entropy_backward)
    divergence_backward_kernel, tile_bytes=16384, max_registers=(None, None)
)


def prepare(op, grad, input, target, row_stats, keep, needed):
    """Returns (the gradients, arguments of row_plan.launch, its constants, its options)."""
    slopes = [like(x, x.shape, x.dtype) if wanted else None for x, wanted in zip((input, target), needed)]
    tensors = input, target, *map(per_row, (keep, grad, row_stats[0])), *slopes
    compute = compute_dtype(input, target, grad)
    plan = DIVERGENCE_BACKWARD, tensors, (2, 3, 4), input.shape, input.dim() - 1, compute
    values = {"OP": op.value, "parameters": 2, "count": row_stats[0].numel()}
    return slopes, plan, values, {"phases": MAP, "per_row_math": True}


def launcher(name, op):
    def divergence_backward(grad, input, target, row_stats, keep=None, temperature=1.0, beta=0.5, *needed):
        check_row_stats("divergence_backward", row_stats, input)
        slopes, plan, values, options = prepare(op, grad, input, target, row_stats, keep, needed or (True, True))
        if input.numel() and any(s is not None for s in slopes):
            launch(name, *plan, (1 / temperature, beta), values, **options)
        return tuple(x.new_empty(0) if d is None else d for x, d in zip((input, target), slopes))

    return divergence_backward


kl_div_with_logits_backward = launcher("kl_div_with_logits_backward", KL)
js_div_with_logits_backward = launcher("js_div_with_logits_backward", JS)
tv_with_logits_backward = launcher("tv_with_logits_backward", TV)

"""lpips_distance in one layer: D = sum_c w_c (u_c - v_c)^2 at each position, for the unit vectors u = x / |x| and
v = y / |y| of its channels. With e = 2 g w (u - v) its gradient is

    dx = (e - u sum u e) / |x|,   dy = -(e - v sum v e) / |y|

The forward stores each position's norms and S = sum w u (u - v). Then sum u e = 2 g S and sum v e = 2 g (S - D): the
backward sums nothing.
"""

import torch
import triton
import triton.language as tl

from ..engine.buffers import empty
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER
from ..engine.math import rounded_product, rounded_quotient, rounded_root
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.row import (
    TileConfig,
    at_most,
    declare,
    divisor,
    one_per_row,
    part_of,
    scaled_squares,
    tile_at,
    unit_vector,
)
from ..engine.row_plan import ALONE, MAP, floor, launch, with_one_per_row
from ..engine.scaling import product_beyond
from ..engine.tensors import like
from ..engine.tile import fetch, in_batch, store, within
from ..vectors.cosine_similarity import cosine_tile, empty_state, merge, widened


@triton.jit
def norm_of(root, unit):
    return product_beyond(root.to(tl.float64), unit.to(tl.float64))


@triton.jit
def unit_rows(x, eps, ACROSS: tl.constexpr):
    """Returns (x / |x|, |x|) of whole rows."""
    unit, x, squares = scaled_squares(x, ACROSS)
    root = rounded_root(squares)
    return x * rounded_quotient(1.0, divisor(root, unit, eps)), norm_of(root, unit)


@triton.jit
def weighed(weight, d, space, m, n, edge, C: tl.constexpr):
    if weight is not None:
        w = fetch(weight, space, m, n, edge, True).to(C)
        d = tl.where(w == 0, 0.0, w * d)  # weight 0 means masked out
    return d


@triton.jit
def add_terms(u, v, weight, space, m, n, edge, config):
    """Returns the sums over the channels of w (u - v)^2 and of w u (u - v), one number per row each."""
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    d = u - v
    by = tl.where(edge, weighed(weight, d, space, m, n, edge, config.C), 0.0)
    distance = tl.sum(rounded_product(d, by), ACROSS, keep_dims=True)
    return distance, tl.sum(rounded_product(u, by), ACROSS, keep_dims=True)


LpipsConfig = constants("AXIS WHOLE BM BN VEC C I")


@triton.jit
def lpips_kernel(
    x: Operand, y: Operand, weight: Operand, keep: Operand, out: Operand, product: Operand, first: Operand,
    second: Operand, eps: tl.float64, space: Space, parts: Parts, config: LpipsConfig,
):  # fmt: skip
    """Writes the distance of each position, sum w u (u - v), and both norms; all 0 where a position is not kept."""
    C: tl.constexpr = config.C
    ACROSS: tl.constexpr = 1 if config.AXIS == INNER else 0
    BO: tl.constexpr = config.BM if config.AXIS == INNER else config.BN
    _, _, batch, block = part_of(1, parts.across, config.I)
    space = in_batch(space, batch, (x, y, weight, keep, out, product, first, second))
    m, n = tile_at(space, block, 0, config)
    if config.WHOLE:
        edge = within(space, m, n)
        u, norm1 = unit_rows(tl.where(edge, fetch(x, space, m, n, edge, True).to(C), 0.0), eps, ACROSS)  # (BM, BN)
        v, norm2 = unit_rows(tl.where(edge, fetch(y, space, m, n, edge, True).to(C), 0.0), eps, ACROSS)
        distance, dot = add_terms(u, v, weight, space, m, n, edge, config)
    else:
        state = empty_state(BO, ACROSS)
        for t in range(0, parts.tiles):
            state = merge(state, widened(cosine_tile(x, y, block, t, space, config)))
        norm1, norm2 = norm_of(tl.sqrt(state[1]), state[0]), norm_of(tl.sqrt(state[3]), state[2])
        distance = state[4] * 0.0
        dot = distance
        for t in range(0, parts.tiles):
            m, n = tile_at(space, block, t, config)
            edge = within(space, m, n)
            u = unit_vector(fetch(x, space, m, n, edge, True).to(C), norm1, eps, C)
            v = unit_vector(fetch(y, space, m, n, edge, True).to(C), norm2, eps, C)
            more, other = add_terms(u, v, weight, space, m, n, edge, config)
            distance, dot = distance + more, dot + other
        m, n = tile_at(space, block, 0, config)
    inside = one_per_row(space, m, n, config)
    if keep is not None:
        kept = fetch(keep, space, m, n, inside, True) != 0
        distance, dot = tl.where(kept, distance, 0.0), tl.where(kept, dot, 0.0)
        norm1, norm2 = tl.where(kept, norm1, 0.0), tl.where(kept, norm2, 0.0)
    store(out, space, m, n, distance.to(C), inside, True)
    store(product, space, m, n, dot.to(C), inside, True)
    store(first, space, m, n, norm1, inside, True)
    store(second, space, m, n, norm2, inside, True)


@triton.jit
def lpips_backward_kernel(
    x: Operand, y: Operand, weight: Operand, grad: Operand, value: Operand, product: Operand, first: Operand,
    second: Operand, dx: Operand, dy: Operand, eps: tl.float64, space: Space, parts: Parts, config: TileConfig,
):  # fmt: skip
    C: tl.constexpr = config.C
    t, _, batch, block = part_of(parts.tiles, parts.across, config.I)
    space = in_batch(space, batch, (x, y, weight, grad, value, product, first, second, dx, dy))
    m, n = tile_at(space, block, t, config)
    nowhere = tl.zeros([1, 1], tl.int1)
    # one number per row: (BM, 1), or (1, BN) for rows across memory
    g = 2 * fetch(grad, space, m, n, nowhere, True).to(C)
    distance = fetch(value, space, m, n, nowhere, True).to(C)
    dot = fetch(product, space, m, n, nowhere, True).to(C)
    norm1 = fetch(first, space, m, n, nowhere, True)
    norm2 = fetch(second, space, m, n, nowhere, True)
    edge = within(space, m, n)
    u = unit_vector(fetch(x, space, m, n, edge, True).to(C), norm1, eps, C)  # (BM, BN)
    v = unit_vector(fetch(y, space, m, n, edge, True).to(C), norm2, eps, C)
    e = g * weighed(weight, u - v, space, m, n, edge, C)
    if dx is not None:
        along = tl.where(at_most(norm1, eps), 0.0, g * dot)  # 0 where the divisor is eps, a constant
        store(dx, space, m, n, unit_vector(e - u * along, norm1, eps, C), edge, True)
    if dy is not None:
        along = tl.where(at_most(norm2, eps), 0.0, g * (dot - distance))
        store(dy, space, m, n, unit_vector(v * along - e, norm2, eps, C), edge, True)


LPIPS, LPIPS_BACKWARD = declare(lpips_kernel), declare(lpips_backward_kernel)


def prepare(input, target, weight, keep):
    """Returns (results, arguments of row_plan.launch, its options)."""
    rows, compute, device = with_one_per_row(input.shape, 1), compute_dtype(input, target), input.device
    results = tuple(empty(rows, dtype, device) for dtype in (compute, compute, torch.float64, torch.float64))
    tensors = input, target, weight, keep, *results
    return results, (LPIPS, tensors, (2, 3, 4, 5, 6, 7), input.shape, 1, compute), {"phases": ALONE}


def prepare_backward(grad, input, target, weight, results, needed):
    slopes = tuple(like(x, x.shape, x.dtype) if wanted else None for x, wanted in zip((input, target), needed))
    tensors = input, target, weight, grad, *results, *slopes
    compute = compute_dtype(input, target)
    return slopes, (LPIPS_BACKWARD, tensors, (2, 3, 4, 5, 6, 7), input.shape, 1, compute), {"phases": MAP}


def lpips_distance(input, target, weight=None, keep=None):
    """weight: (C, 1, 1). keep: bool, True where a position exists, or None; it broadcasts over the channels."""
    results, plan, options = prepare(input, target, weight, keep)
    if input.numel():
        launch("lpips_distance", *plan, (floor(None, plan[-1]),), **options)
    else:
        for x in results:
            x.zero_()
    return results


def lpips_distance_backward(grad, input, target, weight, value, product, norm0, norm1, *needed):
    slopes, plan, options = prepare_backward(grad, input, target, weight, (value, product, norm0, norm1), needed)
    if input.numel() and any(needed):
        launch("lpips_distance_backward", *plan, (floor(None, plan[-1]),), **options)
    return tuple(x.new_empty(0) if dx is None else dx for x, dx in zip((input, target), slopes))

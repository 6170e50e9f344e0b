"""The gradients of info_nce_loss. The products are made again. The slopes of the logits are the only (N, N) matrix in
memory, in half; torch multiplies it by the units. With p the softmax of the logits and g the losses' gradient:

    (1) slopes_ij = s (p_ij - (i = j)) g_i / (|q'_i| |k'_j|)        s: a power of two, so that fp16 holds them
    (2) H = slopes k', and for the keys slopes^T q'
    (3) dq = 2^e / (s temperature) (H - (H . q') q' / |q'|^2)

The sum of a query's slopes times logits is (H . q') / (s temperature). The temperature's gradient is made from it.
"""

import torch
import triton
import triton.language as tl

from ..engine.buffers import empty
from ..engine.kernel import Kernel
from ..engine.operand import constants
from ..engine.scaling import apart, power_below, reciprocal
from .info_nce import inverse_of, load_tile, logits, product_tiling, products, query_scales, splits_of
from .info_nce_units import MISSING, NO_SLOPE, TILE, dtypes_of, launch, plain_plan, row_tiling

SLOPE_TILE = 4096  # rows whose gradients are read at once, to find the largest


@triton.jit
def load_gradient(grad, grad_stride, row_stats, m, rows):
    """The gradients of the losses of rows m; 0 for a row that does not exist."""
    inside = m < rows
    inside = inside & ~(tl.load(row_stats + m, mask=inside, other=MISSING) < 0)
    return tl.load(grad + m.to(tl.int64) * grad_stride, mask=inside, other=0.0)


SlopesConfig = constants("WHOLE STAGES BM BN BG VEC")


@triton.jit
def info_nce_slopes_kernel(
    grad: tl.pointer_type, units: tl.pointer_type, row_stats: tl.pointer_type, temperature: tl.pointer_type,
    slopes: tl.pointer_type, scale: tl.pointer_type, number: tl.float64, grad_stride: tl.tensor, rows: tl.tensor,
    padded: tl.tensor, width: tl.tensor, per_split: tl.tensor, config: SlopesConfig,
):  # fmt: skip
    """scale: receives 1 / s. Every block computes the same s."""
    block, split = tl.program_id(0), tl.program_id(1)
    sizes = tl.zeros([config.BG], tl.float32)
    for start in range(0, rows, config.BG):
        g = load_gradient(grad, grad_stride, row_stats, start + tl.arange(0, config.BG), rows)
        sizes = tl.maximum(sizes, tl.where(tl.abs(g) < float("inf"), tl.abs(g), 0.0))
    unit = power_below(tl.max(sizes, 0))
    if (block == 0) & (split == 0):
        tl.store(scale, unit.to(tl.float64) * 2.0**-30)
    m = block * config.BM + tl.arange(0, config.BM)
    keys = units + padded.to(tl.int64) * width
    query_scale = query_scales(row_stats, m, temperature, number)
    g = load_gradient(grad, grad_stride, row_stats, m, rows) * reciprocal(unit)
    g = g * 2.0**30 * tl.load(row_stats + m)
    largest, inverse = tl.load(row_stats + 4 * padded + m), tl.load(row_stats + 5 * padded + m) * g
    query = load_tile(units, block * config.BM, width, 0, config) if config.WHOLE else None
    first = split * per_split
    n = tl.arange(0, config.BM)
    out = slopes + m.to(tl.int64)[:, None] * padded + n[None, :]
    for tile in tl.range(first, tl.minimum(first + per_split, padded // config.BM), num_stages=config.STAGES):
        product = products(units, keys, query, block, tile, width, config)
        logit = logits(product, query_scale, row_stats, tile, padded, config)
        slope = tl.exp2(logit - largest[:, None]) * inverse[:, None]
        if tile == block:
            slope = tl.where(n[:, None] == n[None, :], slope - g[:, None], slope)
        slope = slope * tl.load(row_stats + padded + tile * config.BM + n)[None, :]
        tl.store(tl.multiple_of(out + tile * config.BM, (16, 16)), slope.to(slopes.dtype.element_ty))


@triton.jit
def gradient_rows(units, row_stats, product, out, strength, factor, rows, columns, padded, width, config):
    m, n = tl.program_id(0) * config.BM + tl.arange(0, config.BM), tl.arange(0, config.BN)
    offset, inside = m[:, None] * width + n[None, :], (m < rows)[:, None] & (n < width)[None, :]
    x = tl.load(tl.multiple_of(units + offset, (16, 16)), mask=inside, other=0.0).to(tl.float32)
    h = tl.load(tl.multiple_of(product + offset, (16, 16)), mask=inside, other=0.0)
    inverse = tl.load(row_stats + m)
    along = tl.sum(h * x, 1)
    e = tl.load(row_stats + 2 * padded + m)
    power = ((e.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    first, second = apart(power * factor)
    slope = (h - (along * inverse * inverse)[:, None] * x) * first[:, None] * second[:, None]
    slope = tl.where((e == NO_SLOPE)[:, None], 0.0, slope)
    pointer = out + m.to(tl.int64)[:, None] * columns + n[None, :]
    if config.VEC > 1:
        pointer = tl.multiple_of(pointer, (16, 16))
    tl.store(pointer, slope.to(out.dtype.element_ty), mask=inside & (n < columns)[None, :])
    if strength is not None:
        along = tl.where(e == NO_SLOPE, 0.0, along.to(tl.float64) * factor)
        tl.store(strength + m, along, mask=m < rows)


GradientsConfig = constants("BM BN FIRST STEP VEC")


@triton.jit
def info_nce_gradients_kernel(
    units: tl.pointer_type, row_stats: tl.pointer_type, temperature: tl.pointer_type, scale: tl.pointer_type,
    query_product: tl.pointer_type, key_product: tl.pointer_type, dquery: tl.pointer_type, dkey: tl.pointer_type,
    strength: tl.pointer_type, number: tl.float64, rows: tl.tensor, columns: tl.tensor, padded: tl.tensor,
    steps: tl.tensor, config: GradientsConfig,
):  # fmt: skip
    """FIRST: the first side with a gradient: 0 the queries, 1 the keys."""
    width, columns = steps * config.STEP, columns * config.VEC
    factor = tl.load(scale) * inverse_of(temperature, number)
    if config.FIRST + tl.program_id(1) == 0:
        if dquery is not None:
            gradient_rows(units, row_stats, query_product, dquery, strength, factor, rows, columns, padded, width,
                          config)  # fmt: skip
    else:
        if dkey is not None:
            gradient_rows(units + padded.to(tl.int64) * width, row_stats + padded, key_product, dkey, None, factor,
                          rows, columns, padded, width, config)  # fmt: skip


SLOPES, GRADIENTS = Kernel(info_nce_slopes_kernel), Kernel(info_nce_gradients_kernel)
# ---- host


def slopes_plan(tensors, arch):
    grad, units = tensors[:2]
    _, padded, width = units.shape
    blocks = padded // TILE
    splits = splits_of(blocks)
    values = {
        "grad_stride": grad.stride(0), "rows": grad.shape[0], "padded": padded, "width": width,
        "per_split": triton.cdiv(blocks, splits), "BG": SLOPE_TILE, **product_tiling(width, arch),
    }  # fmt: skip
    return plain_plan(SLOPES, dtypes_of(tensors), (blocks, splits), values, arch)


def gradients_plan(tensors, arch):
    units, dquery, dkey = tensors[0], *tensors[6:8]
    _, padded, width = units.shape
    rows, columns = (dkey if dquery is None else dquery).shape
    sides = [side for side, x in enumerate((dquery, dkey)) if x is not None]
    vec = 1 if columns % 8 else 8
    values = {"rows": rows, "padded": padded, "FIRST": sides[0], **row_tiling(width, columns, vec)}
    return plain_plan(GRADIENTS, dtypes_of(tensors), (padded // values["BM"], len(sides)), values, arch)


def wide_product(a, b):
    """a @ b of half matrices, in fp32."""
    if not a.is_cuda:  # interpreted
        return a.float() @ b.float()
    with torch.autocast("cuda", enabled=False):
        return torch.mm(a, b, out_dtype=torch.float32)


def info_nce_backward(grad, units, row_stats, temperature, number, columns, need_query, need_key):
    """Returns (gradients of the queries, gradients of the keys, sum of each row's slopes times logits)."""
    device, rows = grad.device, grad.shape[0]
    dquery = empty((rows if need_query else 0, columns), units.dtype, device)
    dkey = empty((rows if need_key else 0, columns), units.dtype, device)
    strength = empty((rows if need_query else 0,), torch.float64, device)
    if rows and columns and (need_query or need_key):
        padded = units.shape[1]
        slopes, scale = empty((padded, padded), units.dtype, device), empty((), torch.float64, device)
        launch(SLOPES, slopes_plan, (grad, units, row_stats, temperature, slopes, scale), number)
        products = [
            wide_product(matrix, units[side]) if need else None
            for need, matrix, side in ((need_query, slopes, 1), (need_key, slopes.T, 0))
        ]
        outputs = [x if need else None for x, need in ((dquery, need_query), (dkey, need_key), (strength, need_query))]
        launch(GRADIENTS, gradients_plan, (units, row_stats, temperature, scale, *products, *outputs), number)
    return dquery, dkey, strength

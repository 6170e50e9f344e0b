"""info_nce_loss of rows in half precision, without their (N, N) logits in memory: for each row the logsumexp of its
logits, less its own logit.

Products of half numbers are exact on the tensor cores, whose sums are fp32. So rows are only scaled by a power of two
each (info_nce_units.py) and multiplied, and the products are multiplied by the inverse norms of query and key:

    logit = (q' . k') / (|q'| |k'| temperature)

The last two row_stats of each query are its largest logit, and 1 / sum 2^(logit - largest), with logits in base 2.
"""

import torch
import triton
import triton.language as tl

from ..engine.blocks import is_last, load
from ..engine.buffers import empty
from ..engine.kernel import Kernel
from ..engine.math import rounded_product
from ..engine.operand import constants
from .info_nce_units import STEP, TILE, UNITS, WHOLE, dtypes_of, launch, padded_shape, plain_plan, units_plan

ROOMY = (90,)  # architectures with shared memory for rows of width WHOLE, and registers for products
BLOCKS = 132  # blocks that run at once
LOWEST = tl.constexpr(-3e38)  # below all logits, and finite
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(units, first, width, column, config):
    """Rows first, ..., first + BM - 1, and BN columns of each from `column` on."""
    m, n = first + tl.arange(0, config.BM), column + tl.arange(0, config.BN)
    pointer = units + m[:, None] * width + n[None, :]
    return tl.load(tl.multiple_of(pointer, (16, 16)))


@triton.jit
def products(units, keys, query, block, tile, width, config):
    """q' . k' of a block's queries with a tile of keys. query: the queries' tile, if it holds whole rows (WHOLE)."""
    if config.WHOLE:
        result = tl.dot(query, load_tile(keys, tile * config.BM, width, 0, config).T)
    else:
        result = tl.zeros([config.BM, config.BM], tl.float32)
        for column in tl.range(0, width, config.BN):
            q = load_tile(units, block * config.BM, width, column, config)
            k = load_tile(keys, tile * config.BM, width, column, config)
            result = tl.dot(q, k.T, result)
    return result


@triton.jit
def logits(product, query_scale, row_stats, tile, padded, config):
    """The logits of the products, in base 2; -inf for a missing key. They are rounded: else the compiler would fuse the
    product with a later subtraction, and a row whose only key is its own would have a loss other than 0."""
    scale = tl.load(row_stats + padded + tile * config.BM + tl.arange(0, config.BM))
    scaled = product * tl.abs(scale)[None, :] + tl.where(scale < 0, float("-inf"), 0.0)[None, :]
    return rounded_product(scaled, query_scale[:, None])


@triton.jit
def inverse_of(temperature, number):
    """1 / temperature, in fp64 (halves by way of fp32, to which all GPUs convert them)."""
    if temperature is None:
        t = tl.full([1], number, tl.float64)
    else:
        t = tl.load(temperature + tl.arange(0, 1))
        t = t if t.dtype == tl.float64 else t.to(tl.float32).to(tl.float64)
    return 1 / t


@triton.jit
def query_scales(row_stats, m, temperature, number):
    """log2(e) / (|q'| temperature). For a missing query |q'| counts as 1: the scale is never 0."""
    return tl.abs(tl.load(row_stats + m)) * (inverse_of(temperature, number) * LOG2_E).to(tl.float32)


InfoNCEConfig = constants("WHOLE STAGES BM BN BS VEC")


@triton.jit
def info_nce_kernel(
    units: tl.pointer_type, row_stats: tl.pointer_type, temperature: tl.pointer_type, partial: tl.pointer_type,
    counter: tl.pointer_type, loss: tl.pointer_type, number: tl.float64, rows: tl.tensor, padded: tl.tensor,
    width: tl.tensor, splits: tl.tensor, per_split: tl.tensor, config: InfoNCEConfig,
):  # fmt: skip
    """A block multiplies its queries with a part of the keys; the last of those that share them computes the losses."""
    block, split = tl.program_id(0), tl.program_id(1)
    m = block * config.BM + tl.arange(0, config.BM)
    keys = units + padded.to(tl.int64) * width
    query_scale = query_scales(row_stats, m, temperature, number)
    largest = tl.full([config.BM], LOWEST, tl.float32)
    total = tl.zeros([config.BM], tl.float32)
    own = total
    query = load_tile(units, block * config.BM, width, 0, config) if config.WHOLE else None
    first = split * per_split
    for tile in tl.range(first, tl.minimum(first + per_split, padded // config.BM), num_stages=config.STAGES):
        product = products(units, keys, query, block, tile, width, config)
        logit = logits(product, query_scale, row_stats, tile, padded, config)
        if tile == block:
            n = tl.arange(0, config.BM)
            own = tl.sum(tl.where(n[:, None] == n[None, :], logit, 0.0), 1)
        above = tl.maximum(largest, tl.max(logit, 1))
        total = total * tl.exp2(largest - above) + tl.sum(tl.exp2(logit - above[:, None]), 1)
        largest = above
    size = splits * padded
    offset = split * padded + m
    tl.store(partial + offset, largest)
    tl.store(partial + size + offset, total)
    tl.store(partial + 2 * size + offset, own)
    if is_last(counter + block, splits):
        s = tl.arange(0, config.BS)[:, None]
        inside = (s < splits) & (m < padded)[None, :]
        parts = partial + s * padded + m[None, :]
        tops = tl.where(inside, load(parts, inside), LOWEST)
        largest = tl.max(tops, 0)
        weight = tl.exp2(tops - largest[None, :])
        total = tl.sum(rounded_product(load(parts + size, inside), weight), 0)
        own = tl.sum(load(parts + 2 * size, inside), 0)
        value = tl.log(total.to(tl.float64)) + (largest.to(tl.float64) - own.to(tl.float64)) / LOG2_E
        there = (m < rows) & ~(tl.load(row_stats + m) < 0)
        tl.store(loss + m, tl.where(there, value.to(tl.float32), 0.0), mask=m < rows)
        tl.store(row_stats + 4 * padded + m, tl.where(there, largest, 0.0))
        tl.store(row_stats + 5 * padded + m, tl.where(there, 1 / total, 0.0))


INFO_NCE = Kernel(info_nce_kernel)

# ---- host


def product_tiling(width, arch):
    """Tiling constants of the kernels that multiply queries by keys."""
    whole = arch in ROOMY and width <= WHOLE
    return {"WHOLE": whole, "STAGES": 2 if whole else 1, "BM": TILE, "BN": width if whole else STEP}


def splits_of(blocks):
    """How many blocks share a tile of queries: as few as possible without many idle multiprocessors."""

    def cost(splits):
        return triton.cdiv(blocks * splits, BLOCKS) * (triton.cdiv(blocks, splits) + 2)

    return min(range(1, min(blocks, 16) + 1), key=cost)


def info_nce_plan(tensors, arch):
    units, partial, loss = tensors[0], tensors[3], tensors[5]
    _, padded, width = units.shape
    splits = partial.shape[1]
    values = {
        "rows": loss.shape[0], "padded": padded, "width": width, "splits": splits,
        "per_split": triton.cdiv(padded // TILE, splits), "BS": triton.next_power_of_2(splits),
        **product_tiling(width, arch),
    }  # fmt: skip
    return plain_plan(INFO_NCE, dtypes_of(tensors), (padded // TILE, splits), values, arch)


def info_nce(query, key, keep=None, temperature=None, number=1.0):
    """Returns (loss of each row, units, row_stats). temperature: a 0-dim tensor, in place of `number`."""
    device, (rows, columns) = query.device, query.shape
    padded, width = padded_shape(rows, columns)
    units = empty((2, padded, width), query.dtype, device)
    row_stats, loss = empty((6, padded), torch.float32, device), empty((rows,), torch.float32, device)
    if rows:
        splits = splits_of(padded // TILE)
        counter = empty((padded,), torch.int32, device)
        partial = empty((3, splits, padded), torch.float32, device)
        launch(UNITS, units_plan, (query, key, keep, units, row_stats, counter))
        launch(INFO_NCE, info_nce_plan, (units, row_stats, temperature, partial, counter, loss), number)
    return loss, units, row_stats

"""The gradient of the segment reductions:

    sum, mean   dx = keep ? (grad / denominator) w : 0; a sum has no denominator
    maximum     dx = keep && x == extreme ? grad / denominator : 0; the denominator counts the elements equal to extreme

I/O: reads mask, weight, and for a maximum x; writes dx. grad, denominator and extreme have one row per sequence.
"""

import triton
import triton.language as tl

from ..engine.buffers import empty
from ..engine.elementwise import WIDEST, compute_dtype, tile_corner
from ..engine.indexing import tile_shape
from ..engine.kernel import COMPUTE, Config, Kernel
from ..engine.launch import Plan, cached_plan
from ..engine.operand import Operand, Space, constants
from ..engine.scaling import quotient_apart
from ..engine.tensors import check_operands, traits
from ..engine.tile import fetch, indices, is_whole, kept, store, with_rows, within
from .segments import check_vectors, groups_of_rows

WAYS = tl.constexpr(256)  # bounds that a block reads at once: one after the other each would cost a round trip


@triton.jit
def sequence_of_ends(m, bounds, segments, steps):
    """For each of a few rows m: the last sequence that begins at or before it; -1 before all, `segments` behind all. It
    searches WAYS bounds at a time, in `steps` steps."""
    low, span = m * 0, segments + 1
    begun = low
    for _ in range(steps):
        step = (span + WAYS - 1) // WAYS
        s = low[:, None] + tl.arange(0, WAYS)[None, :] * step
        bound = tl.load(bounds + s, mask=s <= segments, other=0)
        begun = tl.sum(((bound <= m[:, None]) & (s <= segments)).to(tl.int32), 1).to(m.dtype)
        span = step
        low += tl.maximum(begun - 1, 0) * step
    return low - (begun == 0).to(m.dtype)


@triton.jit
def sequence_of(m, bounds, segments, first, last):
    """For rows m in sequences `first` to `last`: the last sequence that begins at or before each (binary search)."""
    low, high = m * 0 + first, m * 0 + last
    apart = last - first
    while apart > 0:
        middle = low + (high - low + 1) // 2
        bound = tl.load(bounds + middle, mask=(middle >= 0) & (middle <= segments), other=0)
        begun = bound <= m
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
        apart = apart // 2
    return low


@triton.jit
def backward_tile(x, extreme, mask, weight, grad, denominator, out, sequence, segments, space, m, n, config,
                  EDGE: tl.constexpr):  # fmt: skip
    C: tl.constexpr = config.C
    APART: tl.constexpr = denominator is not None and weight is not None and extreme is None and C == tl.float32
    exists = (sequence >= 0) & (sequence < segments)
    keep, w = kept(mask, weight, space, m, n, config, EDGE)
    keep &= exists[:, None]
    # (operands with a row per sequence are bounded by `segments`, also where the tile needs no bounds)
    rows = with_rows(space, segments)
    s = tl.where(exists, sequence, segments)
    inside = exists[:, None] & (n < space.N)[None, :]
    value = fetch(grad, rows, s, n, inside, True).to(C)  # (BM, BN), or (1, BN) where the rows have one sequence
    power = tl.full([1, 1], 1.0, C)
    if denominator is not None:
        by = fetch(denominator, rows, s, n, inside, True, 1)
        if APART:  # the quotient may underflow, although a large weight brings it back: two factors
            value, power = quotient_apart(value, by.to(tl.float64))
        else:
            value = value / by.to(C)
    if extreme is not None:
        maximum = fetch(extreme, rows, s, n, inside, True).to(C)
        v = fetch(x, space, m, n, keep, EDGE).to(C)
        keep &= (v == maximum) | ((v != v) & (maximum != maximum))
    elif weight is not None:
        value = value * (power * w.to(C))
    # select, do not multiply: the gradient may be NaN where an element is not kept
    store(out, space, m, n, tl.where(keep, value, 0.0), within(space, m, n), EDGE)


@triton.jit
def either_tile(x, extreme, mask, weight, grad, denominator, out, sequence, segments, space, m0, n0, m, n, config):
    """Runs backward_tile with or without bounds. sequence: that of each row (BM,), or (1,) if all rows have one."""
    if config.VEC == 1:
        in_bounds = False
    else:
        in_bounds = is_whole(space, m0, n0, config)
    if in_bounds:
        backward_tile(x, extreme, mask, weight, grad, denominator, out, sequence, segments, space, m, n, config, False)
    else:
        backward_tile(x, extreme, mask, weight, grad, denominator, out, sequence, segments, space, m, n, config, True)


SegmentBackwardConfig = constants("BM BN VEC C I")


@triton.jit
def segment_backward_kernel(
    x: Operand, extreme: Operand, mask: Operand, weight: Operand, grad: Operand, denominator: Operand, out: Operand,
    bounds: tl.pointer_type, ids: tl.pointer_type, segments: tl.tensor, steps: tl.tensor, space: Space,
    config: SegmentBackwardConfig,
):  # fmt: skip
    m0, n0 = tile_corner(space, config)
    m, n = indices(m0, n0, config)
    if ids is not None:
        of_rows = tl.load(ids + m, mask=m < space.M, other=-1).to(config.I)
        either_tile(x, extreme, mask, weight, grad, denominator, out, of_rows, segments, space, m0, n0, m, n, config)
    else:
        ends = tl.minimum(m0 + tl.arange(0, 2).to(config.I) * (config.BM - 1), space.M - 1)
        of_ends = sequence_of_ends(ends, bounds, segments, steps)
        first, last = tl.min(of_ends, 0), tl.max(of_ends, 0)
        if first == last:  # as in most tiles: the numbers of a sequence are read once
            of_all = first + tl.zeros([1], config.I)
            either_tile(x, extreme, mask, weight, grad, denominator, out, of_all, segments, space, m0, n0, m, n, config)
        else:
            each = sequence_of(m, bounds, segments, first, last)
            either_tile(x, extreme, mask, weight, grad, denominator, out, each, segments, space, m0, n0, m, n, config)


SEGMENT_BACKWARD = Kernel(segment_backward_kernel, {None: Config(max_registers=(128, 128))})
WAYS_BITS = WAYS.value.bit_length() - 1
PER_SEQUENCE = (1, 4, 5)  # indices of extreme, grad and denominator among the operands


def backward_plan(tensors, bounds, ids, shape, sequences, arch=None):
    """tensors in the kernel's order."""
    x, _, _, weight, grad, _, out = tensors
    outer, inner, kinds, vec, wide = groups_of_rows(tensors, shape, sequences, PER_SEQUENCE)
    M, N = outer.numel, inner.numel
    elements = SEGMENT_BACKWARD.config(arch).tile(out.element_size(), vec, tensors)
    BM, BN = tile_shape(M, N, vec, elements, WIDEST)
    values = {
        "M": M,
        "N": N,
        "BM": BM,
        "BN": BN,
        "VEC": vec,
        "C": COMPUTE[compute_dtype(x, weight, grad, out)],
        "I": tl.int64 if wide else tl.int32,
        "segments": sequences,
        "steps": -(-sequences.bit_length() // WAYS_BITS),
    }
    dtypes = {"bounds": bounds.dtype, "ids": None if ids is None else ids.dtype}
    grid = -(-M // BM) * -(-N // BN), 1
    return Plan(SEGMENT_BACKWARD, tensors, dtypes, outer, inner, kinds, vec, values, grid=grid, wide=wide, arch=arch)


def segment_backward(
    grad, size, dtype, denominator=None, input=None, extreme=None, mask=None, weight=None, cu_seqlens=None,
    segment_ids=None,
):  # fmt: skip
    """Returns the gradient of the input: contiguous, of shape `size`."""
    shape = tuple(size)
    out = empty(shape, dtype, grad.device)
    if out.numel():
        tensors, rows = (input, extreme, mask, weight, grad, denominator, out), (cu_seqlens, segment_ids)
        result, addresses = traits((*tensors, *rows))

        def build(arch):
            check_operands("segment_backward", out, *tensors, *rows)
            check_vectors("segment_backward", cu_seqlens=cu_seqlens, segment_ids=segment_ids)
            return backward_plan(tensors, *rows, shape, cu_seqlens.shape[0] - 1, arch)

        cached_plan((id(SEGMENT_BACKWARD), result), build, grad.device)((*tensors, *rows), addresses)
    return out

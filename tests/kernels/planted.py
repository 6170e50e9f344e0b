"""Kernels with the faults that compiled.py must find, and twins without the fault. This module imports no torch."""

from typing import NamedTuple

import triton
import triton.language as tl
from safeops.kernels.engine.math import rounded_product


class Tile(NamedTuple):
    BM: tl.constexpr
    BN: tl.constexpr


@triton.jit
def apart(x, out, stride, config: Tile):
    """Has `gaps` and `crosswise`: the lanes lie along dim 1, neighbors in memory along dim 0; the sum takes all as a
    row."""
    where = tl.arange(0, config.BM)[:, None] + tl.arange(0, config.BN)[None, :] * stride
    lanes = tl.sum(tl.reshape(tl.load(x + where), (2, config.BM // 2, config.BN)), 0)
    tl.store(out + tl.arange(0, 1), tl.sum(tl.reshape(lanes, (1, config.BM // 2 * config.BN)), 1))


@triton.jit
def near(x, out, stride, config: Tile):
    """Is the twin of `apart` without the faults: the lanes lie along the rows, and the sum reduces one axis after the
    other."""
    where = x + tl.arange(0, config.BM)[:, None] * stride + tl.arange(0, config.BN)[None, :]
    lanes = tl.sum(tl.reshape(tl.load(where), (2, config.BM // 2, config.BN)), 0)
    tl.store(out + tl.arange(0, 1), tl.sum(tl.sum(lanes, 1, keep_dims=True), 0))


@triton.jit
def products(x, out, stride, config: Tile):
    """Has `fused`: sums of squares of rows, with one element per lane."""
    value = tl.load(x + tl.arange(0, config.BM)[:, None] * config.BN + tl.arange(0, config.BN)[None, :])
    tl.store(out + tl.arange(0, config.BM), tl.sum(value * value, 1))


@triton.jit
def rounded(x, out, stride, config: Tile):
    value = tl.load(x + tl.arange(0, config.BM)[:, None] * config.BN + tl.arange(0, config.BN)[None, :])
    tl.store(out + tl.arange(0, config.BM), tl.sum(rounded_product(value, value), 1))


class Pair(NamedTuple):
    first: tl.tuple
    second: tl.tuple


@triton.jit
def numbers_of_first(pair):
    return len(pair.first)


@triton.jit
def alike(x, out, stride, config: Tile):
    """Has `alike`: calls one function with two nestings of the same leaves."""
    tl.store(out, numbers_of_first(Pair((stride,), ())) + 2 * numbers_of_first(Pair((), (stride,))))


@triton.jit
def unlike(x, out, stride, config: Tile):
    tl.store(out, numbers_of_first(Pair((stride,), ())) + 2 * numbers_of_first(Pair((), (stride, stride))))


@triton.jit
def bits(x):
    if x.dtype == tl.float64:
        return x
    return x.to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def behind(x, out, stride, config: Tile):
    """Has code for fp32 only after a `return` for fp64, which Triton 3.6 compiles for fp64 too."""
    tl.store(out, bits(tl.load(x)))

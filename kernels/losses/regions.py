"""Shared parts of the region losses' sums and of their backward: which elements a block takes, and which are kept.

A region is one class of one image. Each image is cut by itself into tiles of classes and pixels, whichever are nearer
in memory. So a row or a column of a tile is a class, and a pixel's class index and mask are read once for all classes
of the tile. An index is checked in the 64 bits that it comes in.
"""

import torch
import triton
import triton.language as tl

from ..engine import tiling
from ..engine.elementwise import compute_dtype
from ..engine.indexing import INNER, OUTER, at_least, power_of_2, tile_shape
from ..engine.kernel import COMPUTE
from ..engine.tensors import check_operands
from ..engine.tile import fetch, kept

SUMS = tl.constexpr(4)
CLASSES = 8  # classes of a tile whose rows are classes: more would save few reads beside the prediction's
WIDEST = 64  # columns of a tile whose columns are classes


@triton.jit
def class_numbers(block, config):
    """The class numbers of a block: (BM, 1), (1, BN), or (1, 1) if both groups are pixels of a single class."""
    if config.AXIS == INNER:
        number = block * config.BM + tl.arange(0, config.BM).to(config.I)[:, None]
    elif config.AXIS == OUTER:
        number = block * config.BN + tl.arange(0, config.BN).to(config.I)[None, :]
    else:
        number = tl.zeros([1, 1], config.I)
    return number


@triton.jit
def image_of(classes, config):
    """Returns (the image of a block, the block's index in the image)."""
    AXIS: tl.constexpr = config.AXIS
    BO: tl.constexpr = config.BN if AXIS == OUTER else (config.BM if AXIS == INNER else 1)  # classes of one block
    across = (classes + BO - 1) // BO  # blocks of one image
    return tl.program_id(0).to(config.I) // across, tl.program_id(0).to(config.I) % across


@triton.jit
def region_tile(x, y, mask, number, classes, ignored, space, m, n, config, EDGE: tl.constexpr):
    """Returns (prediction, target, keep), (BM, BN) each. The first two are 0 where not kept, and if x or y is None.

    number: the class numbers of the tile. ignored: the class index whose pixels are not kept, or -1."""
    C: tl.constexpr = config.C
    keep, _ = kept(mask, None, space, m, n, config, EDGE)
    p = tl.zeros([1, 1], C)
    t = p
    if config.INDEXED:
        index = fetch(y, space, m, n, keep, EDGE)
        # checked in its 64 bits, and narrow from then on
        index = tl.where((index >= 0) & (index < classes) & (index != ignored), index, -1).to(tl.int32)
        keep &= index >= 0
        t = tl.where(keep & (index == number.to(tl.int32)), 1.0, 0.0).to(C)
    elif y is not None:
        t = fetch(y, space, m, n, keep, EDGE).to(C)
    if x is not None:
        p = fetch(x, space, m, n, keep, EDGE).to(C)
    if not config.INDEXED:
        t = tl.where(keep, t, 0.0)
    return tl.where(keep, p, 0.0), t, keep


def tile_of(axis, M, N, vec, elements):
    """(BM, BN): several classes of a pixel, and as many pixels as fit; with single accesses half as many."""
    elements //= 2 if vec == 1 else 1
    if axis is OUTER:
        columns = max(at_least(N, WIDEST), vec)
    elif axis is INNER:
        columns = max(power_of_2(min(max(N, 1), elements // at_least(M, CLASSES))), vec)
    else:
        return tile_shape(M, N, vec, elements, tiling.POLICY.widest)
    return at_least(M, elements // columns), columns


def plan(kernel, tensors, data, like, exists, ignore_index, squared, dtypes, arch=None, policy=None, **values):
    """The plan of a kernel for operands of the shape of `like`. tensors: the last two are the target and the mask.
    data: as in tiling.cut. values: the kernel's own arguments."""
    *others, target, mask = tensors
    indexed = target is not None and target.dtype == torch.int64
    tensors = (*others, target.unsqueeze(1) if indexed else target, mask)  # indices: (N, 1, d1, ...)
    shape = like.shape
    reduced = [d >= 2 for d in range(len(shape))]
    cut = tiling.cut(kernel, tensors, data, shape, reduced, SUMS.value, arch, policy, batched=True, tile_of=tile_of)
    cut = cut.with_shared((len(others), len(others) + 1))
    values |= {
        "classes": shape[1],
        # (pixels whose index is no class are never kept: no such index needs to be passed)
        "ignored": ignore_index if ignore_index is not None and 0 <= ignore_index < shape[1] else -1,
        "exists_stride": 0 if exists is None else exists.stride(0),
        "INDEXED": indexed,
        "SQUARED": squared,
        "C": COMPUTE[compute_dtype(like, *tensors)],
    }
    return cut.plan(kernel, tensors, dtypes | {"exists": None if exists is None else torch.bool}, values, arch)


def check(name, input, target, mask, exists):
    """Memory safety only: tensors that do not fit here would be read beyond their end."""
    check_operands(name, input, target, mask, exists)
    pixels = (input.shape[0], *input.shape[2:]) if target.dtype == torch.int64 else input.shape
    if input.dim() < 2 or target.shape != pixels:
        raise ValueError(f"{name}: target {tuple(target.shape)} for input {tuple(input.shape)}")
    if exists is not None and (exists.dtype != torch.bool or exists.shape != input.shape[1:2]):
        raise ValueError(f"{name}: exists must be {input.shape[1]} bools")

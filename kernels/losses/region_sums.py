"""dice_loss, tversky_loss: the sums that they need, over the kept pixels of each class of each image.

    sums[0] = sum p t    sums[1] = sum p, or p^2    sums[2] = sum t, or t^2    sums[3] = how many pixels are kept

I/O: reads p and t once. Class indices (8 bytes a pixel) are read once for every eight classes (channels last: 64).

The sums are exact to fp32 for any number of pixels. A product of two halves is exact in fp32, and so, nearly, is the
sum of a thread's elements of one access. All larger sums have twice the digits of fp32: rounding errors are summed,
too. Sums in plain fp32 would not do: for a constant prediction, as networks begin with, each addition rounds in the
same direction. fp64 for each element would do, but most GPUs convert to fp64 no faster than memory delivers.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..engine import tiling
from ..engine.blocks import is_last, load_partials
from ..engine.buffers import empty
from ..engine.indexing import ALL, INNER, OUTER
from ..engine.kernel import Config, Kernel
from ..engine.launch import cached_plan
from ..engine.operand import Operand, Parts, Space, constants
from ..engine.tensors import traits
from ..engine.tile import corner, in_batch, indices, is_whole
from .regions import SUMS, check, class_numbers, image_of, plan, region_tile


@triton.jit
def add(high, low, x):
    """(high, low) + x in twice the digits (Knuth's two-sum)."""
    total = high + x
    part = total - high
    return total, low + ((high - (total - part)) + (x - part))


@triton.jit
def over_axis(high, low, config):
    """The sums over the reduced group: (classes of the block, SUMS), in fp64."""
    # (the rounding error of an infinite sum is NaN)
    total = high.to(tl.float64) + tl.where(low == low, low, 0.0).to(tl.float64)
    if config.AXIS == ALL:
        total = tl.sum(tl.sum(total, 1, keep_dims=True), 0)
    elif config.AXIS == INNER:
        total = tl.sum(total, 1)
    else:
        total = tl.sum(total, 0)
    return total


@triton.jit
def add_tile(high, low, x, y, mask, number, classes, ignored, space, m, n, config, EDGE: tl.constexpr):
    LM: tl.constexpr = config.LM
    LN: tl.constexpr = config.LN
    VEC: tl.constexpr = config.VEC
    p, t, keep = region_tile(x, y, mask, number, classes, ignored, space, m, n, config, EDGE)
    both = p * t
    if config.SQUARED:
        p, t = p * p, t * t
    # The four terms as one tensor: by itself, each would be added up in the threads that read the class indices, and
    # not in those that hold the prediction. The last two dimensions, flattened, are (both, p, t, keep).
    terms = tl.join(tl.join(both, t), tl.join(p, keep.to(config.C)))
    # (BM, BN, 2, 2) by lane, as in tile.split_by_lane
    SIDE: tl.constexpr = VEC if LN * VEC <= config.BN else config.BN // LN
    terms = tl.reshape(terms, (config.BM // LM, LM, config.BN // (LN * SIDE), LN, SIDE, SUMS))
    return add(high, low, tl.sum(tl.sum(tl.sum(terms, 4), 2), 0))  # (LM, LN, SUMS)


RegionSumsConfig = constants("INDEXED SQUARED AXIS SPLIT BM BN BS LM LN VEC C I")


@triton.jit
def region_sums_kernel(
    x: Operand, y: Operand, mask: Operand, exists: tl.pointer_type, out: tl.pointer_type, partial: tl.pointer_type,
    counter: tl.pointer_type, classes: tl.tensor, ignored: tl.tensor, exists_stride: tl.tensor, space: Space,
    parts: Parts, config: RegionSumsConfig,
):  # fmt: skip
    I: tl.constexpr = config.I
    BO: tl.constexpr = config.BN if config.AXIS == OUTER else (config.BM if config.AXIS == INNER else 1)
    splits, outputs = parts.splits, parts.outputs
    image, block = image_of(classes, config)
    space = in_batch(space, image, (x, y, mask))
    split = tl.program_id(1).to(I)
    number = class_numbers(block, config)

    high = tl.zeros([config.LM, config.LN, SUMS], config.C)
    low = high
    first = split * parts.per_split
    for tile in range(first, tl.minimum(first + parts.per_split, parts.tiles)):
        m0, n0 = corner(space, block, tile, config)
        m, n = indices(m0, n0, config)
        # (in a whole tile, the comparisons of indices with classes would go through shared memory)
        if config.VEC == 1 or config.INDEXED:
            in_bounds = False
        else:
            in_bounds = is_whole(space, m0, n0, config)
        if in_bounds:
            high, low = add_tile(high, low, x, y, mask, number, classes, ignored, space, m, n, config, False)
        else:
            high, low = add_tile(high, low, x, y, mask, number, classes, ignored, space, m, n, config, True)

    which, output = tl.arange(0, SUMS).to(I)[None, :], block * BO + tl.arange(0, BO).to(I)[:, None]
    place = which * outputs + image * classes + output  # (BO, SUMS)
    base = out  # (SUMS, N, C); with SPLIT each split stores as many partial sums
    if config.SPLIT:
        base = partial + split * outputs * SUMS
    total = over_axis(high, low, config)
    if exists is not None:  # a bool for each class
        total = tl.where(tl.load(exists + output * exists_stride, mask=output < classes, other=0), total, 0.0)
    tl.store(base + place, total, mask=output < classes)
    if config.SPLIT:
        if is_last(counter + tl.program_id(0), splits):
            inside = tl.reshape(output + which * 0, (BO * SUMS,)) < classes
            # (places behind the last class are not read: they are the next image's, whose blocks may be writing)
            places = tl.where(inside, tl.reshape(place, (BO * SUMS,)), outputs * SUMS)
            totals = tl.zeros([BO * SUMS], tl.float64)
            for first in range(0, splits, config.BS):  # (added step by step: else it spills on sm_100 and sm_120)
                loaded = load_partials(partial, splits, first, places, outputs * SUMS, config.BS, 0)[0]
                totals += tl.sum(loaded, 0)
            tl.store(out + places, totals, mask=inside)


REGION_SUMS = Kernel(region_sums_kernel, {None: Config(max_registers=(80, 128))})  # as in sums.py


def sums_plan(input, target, mask, exists, ignore_index, squared, arch=None):
    # Fewer splits than for a sum, and more partials gathered at a time: each class has four numbers.
    policy = tiling.POLICY._replace(blocks=tiling.POLICY.blocks // 2, partials=tiling.POLICY.partials * 4 // SUMS.value)
    tensors, dtypes = (input, target, mask), {"out": torch.float64}
    launch_plan = plan(REGION_SUMS, tensors, 1, input, exists, ignore_index, squared, dtypes, arch, policy)
    # a thread holds the sums of eight classes, and needs the registers
    if launch_plan.constants["AXIS"] == OUTER.value and launch_plan.constants["VEC"] == 8:
        launch_plan.config = replace(launch_plan.config, max_registers=(128, 128))
    return launch_plan


def region_sums(input, target, mask=None, exists=None, ignore_index=None, squared=False):
    """The sums, (4, N, C) in fp64."""
    device, tensors = input.device, (input, target, mask, exists)
    result, addresses = traits(tensors)

    def build(arch):
        check("region_sums", *tensors)
        return sums_plan(*tensors, ignore_index, squared, arch)

    launch_plan = cached_plan((id(REGION_SUMS), result, ignore_index, squared, tiling.POLICY), build, device)
    out = empty((SUMS.value, *input.shape[:2]), torch.float64, device)
    if out.numel():
        launch_plan((*tensors, out, *tiling.workspace(launch_plan, device)), addresses)
    return out

"""Shared parts of the kernels for losses whose rows have a class, or class probabilities."""

import torch
import triton
import triton.language as tl

from .blocks import add_partials, is_last
from .buffers import empty
from .indexing import INNER
from .operand import Operand
from .row import one_per_row
from .row_plan import BUNDLE, BUNDLES
from .tile import base_of, fetch, offset_of, store


@triton.jit
def at_class(class_index, operand, space, config):
    """The offset of each row's class along the class dimension of an operand, in elements."""
    if config.AXIS == INNER:
        offset = offset_of(class_index, space.inner_shape, operand.inner)
    else:
        offset = offset_of(class_index, space.outer_shape, operand.outer)
    return offset


@triton.jit
def own_class(class_index, operand, space, m, n, config):
    """Pointers to an operand's element at each row's class: (BM, 1), or (1, BN) for rows across memory."""
    if config.AXIS == INNER:
        row = offset_of(m, space.outer_shape, operand.outer)[:, None]
    else:
        row = offset_of(n, space.inner_shape, operand.inner)[None, :]
    return base_of(operand, space) + row + at_class(class_index, operand, space, config)


NOWHERE = tl.constexpr(1 << 10)  # larger than any Operand.place: base_of takes the Operand's own pointer


@triton.jit
def fetch_stat(row_stats, offset, space, m, n):
    """Loads one number per row: `offset` elements behind the row's first number in row_stats, which backward reads."""
    base = base_of(row_stats, space) + offset
    nowhere = tl.zeros([1, 1], tl.int1)
    return fetch(
        Operand(base, row_stats.outer, row_stats.inner, row_stats.batch, row_stats.kind, NOWHERE),
        space, m, n, nowhere, True,
    )  # fmt: skip


@triton.jit
def store_stat(row_stats, offset, space, m, n, value, inside):
    base = base_of(row_stats, space) + offset
    store(
        Operand(base, row_stats.outer, row_stats.inner, row_stats.batch, row_stats.kind, NOWHERE),
        space, m, n, value, inside, True,
    )  # fmt: skip


@triton.jit
def upstream(grad, denominator, space, m, n):
    """The upstream gradient of each row's loss, in fp64: grad or, for a mean over all rows, grad / denominator."""
    if denominator is None:
        g = fetch(grad, space, m, n, tl.zeros([1, 1], tl.int1), True).to(tl.float64)
    else:
        g = tl.full([1, 1], tl.load(grad.pointer).to(tl.float64) / tl.load(denominator.pointer), tl.float64)
    return g


@triton.jit
def class_of(target, mask, weight, ignore_index, space, m, n, config, PARTIAL: tl.constexpr = False):
    """Returns (class_index, keep, w): the row's class, or -1; bool, True where the row is kept; the weight of its
    class. Each has one number per row: (BM, 1), or (1, BN) for rows across memory.

    Without a target, where rows have probabilities, class_index is -1. A row is not kept if its index is no class, or
    its class has weight 0. PARTIAL: the tensor has some of the classes; a row of any other class is kept, too."""
    nowhere = tl.zeros([1, 1], tl.int1)
    keep = one_per_row(space, m, n, config)
    if mask is not None:
        keep &= fetch(mask, space, m, n, nowhere, True)
    class_index = tl.where(keep, -1, -1).to(config.I)
    w = tl.where(keep, 1.0, 0.0).to(config.C)
    if target is not None:
        index = fetch(target, space, m, n, nowhere, True)
        # (ignore_index comes in fp64. An index that fp64 cannot hold exactly is no class, and never kept.)
        keep &= index.to(tl.int64) != tl.full([1, 1], ignore_index, tl.int64)
        result = keep & (index >= 0) & (index < (space.N if config.AXIS == INNER else space.M))
        class_index = tl.where(result, index, -1).to(config.I)
        if weight is not None:
            pointer = weight.pointer + at_class(tl.where(result, class_index, 0), weight, space, config)
            w = tl.load(pointer, mask=result, other=0).to(config.C)
            result &= w != 0
        if PARTIAL:
            keep &= result | (class_index < 0)
        else:
            keep = result
    return class_index, keep, w


NONE, MEAN, SUM_OF_ROWS = (tl.constexpr(i) for i in range(3))  # REDUCE: how the rows' losses are reduced


@triton.jit
def store_part(partial, class_index, size, total, count, weights, WEIGHTED: tl.constexpr):
    tl.store(partial + class_index, total)
    tl.store(partial + size + class_index, count)
    if WEIGHTED:
        tl.store(partial + 2 * size + class_index, weights)


@triton.jit
def add_up(value, kept, w, out, used, partial, counter, group, groups, config, WEIGHTED: tl.constexpr):
    """Stores the sum or mean of all rows' losses in `out`, added up in a fixed order: (1) each block stores its part;
    (2) the last block of a bundle to finish adds up the parts of its blocks; (3) the last of these adds up the bundles.
    `used` gets what a mean divides by: the count of the kept rows, or the sum of their weights. w: 0 where not kept."""
    ARRAYS: tl.constexpr = 3 if WEIGHTED else 2
    most = tl.maximum(BUNDLE, (groups + BUNDLES - 1) // BUNDLES)  # blocks per bundle
    bundle, bundles = group // most, (groups + most - 1) // most
    size = tl.minimum(most, groups - bundle * most)
    of_bundle, of_all, first = partial + 3 * bundle * most, partial + 3 * groups, tl.zeros([1], tl.int32)
    total = tl.sum(tl.sum(value.to(tl.float64), 1), 0)
    count = tl.sum(tl.sum(kept.to(tl.int32), 1), 0).to(tl.float64)
    weights = tl.sum(tl.sum(w.to(tl.float64), 1), 0)
    store_part(of_bundle, group - bundle * most, size, total, count, weights, WEIGHTED)
    if is_last(counter + bundle, size):
        totals, counts, sums = add_partials(of_bundle, size, first, 1, BUNDLE, 1, ARRAYS)
        store_part(of_all, bundle + first, bundles, totals, counts, sums, WEIGHTED)
        if is_last(counter + bundles, bundles):
            totals, counts, sums = add_partials(of_all, bundles, first, 1, BUNDLE, 1, ARRAYS)
            by = sums if WEIGHTED else counts
            result = totals
            if config.REDUCE == MEAN:
                result = totals / by
            result = tl.where(counts > 0, result, float("nan") if config.EMPTY_NAN else 0.0)
            tl.store(out.pointer + first, result.to(out.pointer.dtype.element_ty))
            tl.store(used.pointer + first, by)


def class_dim(x):
    return 1 if x.dim() > 1 else 0


def row_shape(x):
    """The shape of x without its class dimension: (N, C, d1, ...) gives (N, d1, ...), and (C,) gives ()."""
    dim = class_dim(x)
    return x.shape[:dim] + x.shape[dim + 1 :]


def per_row(number, x):
    """A tensor that broadcasts to one number per row, expanded, with a class dimension of size 1: (N, 1, d1, ...)."""
    return None if number is None else number.expand(row_shape(x)).unsqueeze(class_dim(x))


def per_class(weight, x):
    """weight (C,) with the dimensions of x added, so that it broadcasts to (N, C, d1, ...)."""
    dim = class_dim(x)
    return None if weight is None else weight[(None,) * dim + (slice(None),) + (None,) * (x.dim() - dim - 1)]


def row_results(x, dtype, *many):
    return empty((*many, *row_shape(x)), dtype, x.device)


def reduced_results(x, dtype):
    """Returns ((sum or mean, divisor of the mean), the two scalars expanded to the rows, as operands for `add_up`)."""
    results = empty((), dtype, x.device), empty((), torch.float64, x.device)
    return results, [per_row(t, x) for t in results]


def reduction(mean, empty_nan):
    """The constants of a reduction. mean: True for the mean, False for the sum, None for each row's loss."""
    kind = NONE if mean is None else MEAN if mean else SUM_OF_ROWS
    return {"REDUCE": kind.value, "EMPTY_NAN": empty_nan}


def count_stats(has_probabilities, weighted, smooth):
    """How many numbers per row the backward of cross_entropy needs: maximum and log_total, and, where the call has
    them, k and e (cross_entropy_backward.py)."""
    return 2 + (has_probabilities or (weighted and smooth)) + smooth

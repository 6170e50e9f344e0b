"""Rows that have a class each, or class probabilities: what cross_entropy and nll_loss have in common."""

import triton
import triton.language as tl

from ..engine.buffers import empty
from ..engine.indexing import INNER
from ..engine.tile import fetch, offset_of
from .row import one_per_row


@triton.jit
def at_class(place, space, operand, AXIS: tl.constexpr):
    """The offset of each row's class along the classes of an operand."""
    if AXIS == INNER:
        offset = offset_of(place, space[3], operand[2])
    else:
        offset = offset_of(place, space[2], operand[1])
    return offset


@triton.jit
def at_row(space, operand, m, n, AXIS: tl.constexpr):
    """The offset of each row's first class."""
    if AXIS == INNER:
        offset = offset_of(m, space[2], operand[1])[:, None]
    else:
        offset = offset_of(n, space[3], operand[2])[None, :]
    return offset


@triton.jit
def after(numbers, count):
    """The operand of the next number of each row."""
    return numbers[0] + count.to(tl.int64), numbers[1], numbers[2]


@triton.jit
def class_of(
    space, target, mask, weight, ignore_index, m, n,
    TARGET: tl.constexpr, MASK: tl.constexpr, WEIGHT: tl.constexpr, PARTIAL: tl.constexpr, AXIS: tl.constexpr,
    C: tl.constexpr, I: tl.constexpr,
):  # fmt: skip
    """(each row's class, -1 where it has none; whether the row is kept; the weight of its class).

    Without a target, where rows have probabilities, a row has no class. An index that is no class excludes its row, and
    so does a class of weight 0; PARTIAL: it is one of others than these classes, and its row is kept."""
    nowhere = tl.zeros([1, 1], tl.int1)
    keep = one_per_row(space, m, n, AXIS)
    if MASK:
        keep &= fetch(mask, space, m, n, nowhere, MASK, True)
    place = tl.where(keep, -1, -1).to(I)
    w = tl.where(keep, 1.0, 0.0).to(C)
    if TARGET:
        index = fetch(target, space, m, n, nowhere, TARGET, True)
        # in fp64, which holds every index of a class exactly; one that is none is excluded in any case
        keep &= index.to(tl.float64) != ignore_index
        found = keep & (index >= 0) & (index < (space[1] if AXIS == INNER else space[0]))
        place = tl.where(found, index, -1).to(I)
        if WEIGHT:
            where = weight[0] + at_class(tl.where(found, place, 0), space, weight, AXIS)
            w = tl.load(where, mask=found, other=0).to(C)
            found &= w != 0
        if PARTIAL:
            keep &= found | (place < 0)
        else:
            keep = found
    return place, keep, w


def class_dim(x):
    return 1 if x.dim() > 1 else 0


def row_shape(x):
    """(N, C, d1, ...) -> (N, d1, ...); (C,) -> ()."""
    dim = class_dim(x)
    return x.shape[:dim] + x.shape[dim + 1 :]


def per_row(number, x):
    """A number of each row, or one that broadcasts to it, as it broadcasts to (N, C, d1, ...)."""
    return None if number is None else number.expand(row_shape(x)).unsqueeze(class_dim(x))


def per_class(weight, x):
    """(C,) as it broadcasts to (N, C, d1, ...)."""
    dim = class_dim(x)
    return None if weight is None else weight[(None,) * dim + (slice(None),) + (None,) * (x.dim() - dim - 1)]


def row_numbers(x, dtype, *many):
    return empty((*many, *row_shape(x)), dtype, x.device)


def count_numbers(shares, weighted, smooth):
    """How many numbers of a row the backward of cross_entropy needs: two of L, and where there are any k and e."""
    return 2 + (shares or (weighted and smooth)) + smooth

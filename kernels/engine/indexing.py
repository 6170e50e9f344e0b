"""Maps tensors of any strides to tiles, on the host. Dimensions are sorted, merged where every operand allows it, and
divided into an outer and an inner group. An element's offset is offset(outer index) + offset(inner index), so that the
divisions for an offset are paid once for each row and each column of a tile, not for each element.

Each operand has a kind, fixed at compile time, that says how it varies over the tile.
"""

from math import prod
from typing import NamedTuple

import triton.language as tl

ABSENT = tl.constexpr(0)
VECTOR = tl.constexpr(1)  # unit stride along the inner group, 16-byte aligned: vector accesses
SCALAR = tl.constexpr(2)  # one element for the whole tensor, such as the gradient of a mean
ROW = tl.constexpr(3)  # stride 0 along the inner group: one element per row
STRIDED = tl.constexpr(4)  # anything else
COLUMN = tl.constexpr(5)  # stride 0 along the outer group, any along the inner: one element per column
LINE = tl.constexpr(6)  # like COLUMN, with the vector accesses of VECTOR
# PEELED + VEC: unit stride along rows that begin anywhere. Accesses take VEC elements, and may begin before the row.
PEELED = tl.constexpr(8)
UNALIGNED = tl.constexpr(24)  # + VEC: unit stride, but rows do not begin where the tile's accesses of VEC elements do

OUTER, INNER, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # AXIS: which group is reduced

# Offsets and indices are 32-bit below this; the margin lets an index run past the end by a tile.
INT32_LIMIT = 2**31 - 2**17


class Group(NamedTuple):
    """Fused dimensions, slowest first, and each operand's strides over them."""

    shape: tuple
    strides: tuple  # one tuple per operand; None for an absent one

    @property
    def numel(self):
        return prod(self.shape)

    def first(self, operands):
        return self._replace(strides=self.strides[:operands])

    def without(self, places):
        """The group, with the operands at the indices `places` absent."""
        return self._replace(strides=tuple(None if i in places else s for i, s in enumerate(self.strides)))


def broadcast_strides(tensor, shape):
    """The strides that read `tensor` at every position of `shape` (0 where it is broadcast)."""
    if tensor.shape == shape:
        return tuple([0 if size == 1 else stride for size, stride in zip(shape, tensor.stride())])
    lead = len(shape) - tensor.dim()
    if lead < 0 or any(size != want and size != 1 for size, want in zip(tensor.shape, shape[lead:])):
        raise ValueError(f"shape {tuple(tensor.shape)} does not broadcast to {tuple(shape)}")
    return (0,) * lead + tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride()))


def line(tensors, shape):
    """Returns the groups (outer, inner) of tensors with all of `shape` as one inner dimension, or None if a tensor does
    not fit: each must be None, or contiguous and of this shape, or one element, expanded or not. (For other tensors,
    memory_order, fuse and split_inner take 40 us.)"""
    inner, total = [], prod(shape)
    if not total:
        return None
    for x in tensors:
        if x is None:
            inner.append(None)
        elif x.shape == shape and x.is_contiguous():
            inner.append((1,) if total != 1 else (0,))
        elif x.numel() == 1 and x.dim() <= len(shape) or x.shape == shape and not any(x.stride()):
            inner.append((0,))
        else:
            return None
    return Group((1,), tuple([s and (0,) for s in inner])), Group((total,), tuple(inner))


def memory_order(shape, strides):
    """Dimensions of more than one element, from the farthest apart in memory to the nearest. For a pair of dimensions
    the first operand (in the caller's order) with nonzero, different strides over both decides."""

    def compare(a, b):
        for steps in strides:
            if steps is not None and steps[a] and steps[b] and steps[a] != steps[b]:
                return steps[b] - steps[a]
        return a - b

    dims = [d for d, size in enumerate(shape) if size != 1]
    for end in range(1, len(dims)):  # insertion sort: the relation need not be transitive, as sort() requires
        at = end
        while at and compare(dims[at - 1], dims[at]) > 0:
            dims[at - 1], dims[at] = dims[at], dims[at - 1]
            at -= 1
    return dims


def fuse(dims, shape, strides):
    """Merge neighbouring dimensions where every operand steps through both with a single stride."""
    sizes, steps = [], []
    for d in dims:
        here = [None if s is None else s[d] for s in strides]
        if sizes and all(h is None or last == h * shape[d] for last, h in zip(steps[-1], here)):
            sizes[-1] *= shape[d]
            steps[-1] = here
        else:
            sizes.append(shape[d])
            steps.append(here)
    if not sizes:
        sizes, steps = [1], [[None if s is None else 0 for s in strides]]
    return Group(tuple(sizes), tuple(None if s is None else tuple(column) for s, column in zip(strides, zip(*steps))))


def split_inner(fused):
    """Returns two groups: all dimensions but the nearest in memory, and the nearest."""

    def part(where, shape, step):
        return Group(fused.shape[where] or shape, tuple(s and (s[where] or step) for s in fused.strides))

    return part(slice(None, -1), (1,), (0,)), part(slice(-1, None), (1,), (0,))


def kind_of(outer, inner):
    if inner is None:
        return ABSENT
    if not any(inner):
        return ROW if any(outer) else SCALAR
    return VECTOR if inner == (1,) else STRIDED


def tile_kinds(tensors, outer, inner, alike=False, shared=()):
    """Returns (kind of each operand, VEC). VEC: the elements of one access, or 1 for the variant that assumes nothing
    about strides and alignment. alike: rows of one length get the same kinds and VEC, whatever their number, and
    wherever masks and the operands at the indices `shared` (one for all rows, such as class weights) begin."""
    kinds = [kind_of(o, i) for o, i in zip(outer.strides, inner.strides)]
    vectors = [i for i, kind in enumerate(kinds) if kind is VECTOR]
    numbers = [i for i in vectors if tensors[i].dtype.is_floating_point and i not in shared]
    vec = 16 // min([tensors[i].element_size() for i in numbers], default=1) if vectors else 1  # only masks: 1 byte
    whole_rows = outer.numel == 1 and not alike or inner.numel % vec == 0
    for i in vectors:
        if tensors[i].data_ptr() % 16 or any(step % vec for step in outer.strides[i]):
            kinds[i] = UNALIGNED + vec
    single = [i for i, kind in enumerate(kinds) if kind is STRIDED or kind > UNALIGNED]
    free = [i for i in single if i in shared or not tensors[i].dtype.is_floating_point] if alike and numbers else []
    if vec > 1 and whole_rows and len(single) == len(free):
        return kinds, vec
    return [kind if kind in (ABSENT, SCALAR) else STRIDED for kind in kinds], 1


def peeled_kinds(tensors, outer, inner, lead, shared=()):
    """Returns (kind of each operand, VEC) for rows that begin anywhere; VEC is 1 if the operand at index `lead` has no
    unit stride. An operand is PEELED if its rows begin at the same offset modulo VEC elements as those of `lead`, else
    UNALIGNED; a row's sum has the same bits either way. shared: as in tile_kinds."""
    kinds = [kind_of(o, i) for o, i in zip(outer.strides, inner.strides)]
    rows = [i for i, kind in enumerate(kinds) if kind is VECTOR and i not in shared]
    if lead not in rows:
        return kinds, 1
    vec = 16 // max(tensors[i].element_size() for i in rows if tensors[i].dtype.is_floating_point)
    along = [i for i in rows if any(outer.strides[i]) == any(outer.strides[lead])]

    def begins(i):
        return [tensors[i].data_ptr() // tensors[i].element_size() % vec, *(step % vec for step in outer.strides[i])]

    first = begins(lead)
    for i, kind in enumerate(kinds):
        if kind is VECTOR:
            in_words = i in along and tensors[i].element_size() * vec >= 8
            kinds[i] = (PEELED if begins(i) == first else UNALIGNED) + vec if in_words else STRIDED
    return kinds, vec


def sparse_kinds(kinds, outer, inner, which):
    """Returns the kinds, with new ones for the operands at the indices `which`: small ones, such as one number per row.
    They are loaded once per row, column or tile. Give tile_kinds None in their place: they do not affect VEC then."""
    kinds = list(kinds)
    for i in which:
        o, n = outer.strides[i], inner.strides[i]
        if o is not None:
            kinds[i] = (STRIDED if any(n) else ROW) if any(o) else (COLUMN if any(n) else SCALAR)
    return kinds


def shared_kinds(kinds, outer, inner, which):
    """Returns the kinds, with new ones for the operands at the indices `which`, which many rows share, as all classes
    share a class index. They are read once for a tile, with vector accesses where tile_kinds found them."""
    shared = sparse_kinds(kinds, outer, inner, which)
    for i in which:
        if kinds[i] is VECTOR:
            shared[i] = VECTOR if any(outer.strides[i]) else LINE
    return shared


def tile_shape(M, N, vec, tile, widest):
    """(BM, BN). BN is a power of 4, to keep the variants few, and at most N: less than half of a tile is lost."""
    columns = power_of_2(min(max(N, 1), max(widest, tile)))
    if M == 1:
        widest = tile
    elif columns < widest and columns.bit_length() % 2 == 0:
        columns //= 2
    columns = max(min(columns, widest, tile), vec)
    return at_least(M, tile // columns), columns


def power_of_2(n):
    """The largest power of two that is at most n."""
    return 1 << (n.bit_length() - 1)


def at_least(n, most):
    """The smallest power of two that is at least n, or `most`, a power of two, if that is smaller."""
    return power_of_2(2 * min(max(n, 1), most) - 1)


def needs_int64(outer, inner, *counts):
    """True if an offset, or an index that runs past the end by a tile, may not fit 32 bits."""
    sizes, most = outer.shape + inner.shape, [outer.numel * inner.numel, *counts]
    for o, i in zip(outer.strides, inner.strides):
        steps = zip(sizes, (o or ()) + (i or ()))
        most.append(sum((size - 1) * step for size, step in steps))
    return any(n >= INT32_LIMIT for n in most)

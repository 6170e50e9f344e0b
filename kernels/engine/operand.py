"""The arguments of a kernel that are more than a number, each a NamedTuple whose fields say what is passed:

    tl.tensor       an index, or the pointer of an operand
    tl.tuple        indices, such as strides: as many as there are dimensions
    tl.constexpr    a constant, for which the kernel is compiled

A kernel takes `kernel(x, target, mask, ..., space, parts, config)`. An operand that is absent is None, and so is a
field that the launch leaves out. A functor is a constant too.

To Triton all arguments are one tree of tuples, of which it compiles and passes the leaves.
"""

from typing import NamedTuple

import triton.language as tl


class Operand(NamedTuple):
    """A tensor in the shape of the space: the offset of an element is that of its batch, of its row and of its column.

    kind: how it varies over a tile (indexing.py). place: among the kernel's operands."""

    pointer: tl.tensor
    outer: tl.tuple  # strides over outer_shape
    inner: tl.tuple  # strides over inner_shape
    batch: tl.tuple  # strides over batch_shape
    kind: tl.constexpr
    place: tl.constexpr


class Space(NamedTuple):
    """(M, N): the two groups of dimensions that indexing.py makes; and the batch, of which a block has one index.

    A kernel sets the last three. pointers: where its first operands begin in this batch (tile.in_batch). Of rows that
    begin at no multiple of 16 bytes (PEELED), span: where a row begins and ends, in columns from where its tiles begin
    that are written; column: the first one of a tile that is summed. (They must differ in length: to Triton 3.6
    ((n,), ()) and ((), (n,)) are the same arguments.)"""

    M: tl.tensor
    N: tl.tensor
    outer_shape: tl.tuple  # of the M rows
    inner_shape: tl.tuple  # of the N columns
    batch_shape: tl.tuple
    pointers: tl.tuple = ()
    span: tl.tuple = ()
    column: tl.tuple = ()


class Parts(NamedTuple):
    """How the tiles are spread over blocks. Reductions have `outputs` and their strides, rows have `groups`."""

    tiles: tl.tensor  # of an output block, or of a group of rows
    written: tl.tensor  # tiles of a group of rows where they are written
    splits: tl.tensor  # blocks that share them
    per_split: tl.tensor  # tiles of each; of rows, pieces
    outputs: tl.tensor
    out_strides: tl.tuple  # over the group that is not reduced
    pieces: tl.tensor  # of a row, which are summed one by one
    per_piece: tl.tensor  # tiles of each
    groups: tl.tensor  # of rows
    across: tl.tensor  # groups of one batch


def constants(names):
    """The type of a kernel's config: a NamedTuple of constants."""
    return NamedTuple("Constants", [(name, tl.constexpr) for name in names.split()])


def leaves(x, path=()):
    """(path, leaf) of nested tuples, as Triton numbers and passes them."""
    if isinstance(x, (tuple, list)):
        for i, each in enumerate(x):
            yield from leaves(each, (*path, i))
    else:
        yield path, x


def map_leaves(function, x):
    """Nested tuples of the form of x, with function(leaf) in the place of each leaf."""
    if isinstance(x, tuple):
        values = [map_leaves(function, each) for each in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    return function(x)


def is_constant(leaf):
    return leaf is None or isinstance(leaf, tl.constexpr)

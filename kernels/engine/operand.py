"""Tuples that a kernel takes in place of single parameters. A field's annotation says what is passed:

    tl.tensor       an index, or the pointer of an operand
    tl.tuple        indices, such as strides: one per dimension
    tl.constexpr    a constant: the kernel is compiled for its value

A kernel takes `kernel(x, target, mask, ..., space, parts, config)`. An absent operand is None, and so is a field that
the launch leaves out. A functor is a constant too.

To Triton all arguments are one tree of tuples. It compiles and passes the leaves.
"""

from typing import NamedTuple

import triton.language as tl


class Operand(NamedTuple):
    """A tensor broadcast to the shape of the space. An element's offset is the sum of the offsets of its batch, its row
    and its column.

    kind: how it varies over a tile (indexing.py). place: its index among the kernel's operands."""

    pointer: tl.tensor
    outer: tl.tuple  # strides over outer_shape
    inner: tl.tuple  # strides over inner_shape
    batch: tl.tuple  # strides over batch_shape
    kind: tl.constexpr
    place: tl.constexpr


class Space(NamedTuple):
    """M rows and N columns: the outer and inner group of dimensions of indexing.py. A block has one index of the batch.

    A kernel sets the last three fields. pointers: where its first operands begin in this batch (tile.in_batch). span
    and column are for rows that begin at no multiple of 16 bytes (PEELED). span: the row's first column and its end,
    counted from where the written tiles begin. column: the first column of a summed tile. (Their lengths must differ:
    to Triton 3.6 ((n,), ()) and ((), (n,)) are the same arguments.)"""

    M: tl.tensor
    N: tl.tensor
    outer_shape: tl.tuple  # dimensions of the M rows
    inner_shape: tl.tuple  # dimensions of the N columns
    batch_shape: tl.tuple
    pointers: tl.tuple = ()
    span: tl.tuple = ()
    column: tl.tuple = ()


class Parts(NamedTuple):
    """How the tiles are spread over blocks. Reductions set `outputs` and `out_strides`, rows the last four."""

    tiles: tl.tensor  # tiles of an output block, or of a group of rows
    written: tl.tensor  # tiles of a group of rows when they are written; a PEELED row may need one more
    splits: tl.tensor  # blocks that share these tiles
    per_split: tl.tensor  # tiles of each block; for rows, pieces of each block
    outputs: tl.tensor
    out_strides: tl.tuple  # over the group that is not reduced
    pieces: tl.tensor  # pieces of a row, each summed by itself
    per_piece: tl.tensor  # tiles of each piece
    groups: tl.tensor  # groups of rows
    across: tl.tensor  # groups of rows in one batch


def constants(names):
    """The type of a kernel's config: a NamedTuple of constants."""
    return NamedTuple("Constants", [(name, tl.constexpr) for name in names.split()])


def leaves(x, path=()):
    """Yields (path, leaf) of nested tuples, in the order in which Triton numbers and passes the leaves."""
    if isinstance(x, (tuple, list)):
        for i, each in enumerate(x):
            yield from leaves(each, (*path, i))
    else:
        yield path, x


def map_leaves(function, x):
    """x, nested tuples, with each leaf replaced by function(leaf)."""
    if isinstance(x, tuple):
        values = [map_leaves(function, each) for each in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    return function(x)


def is_constant(leaf):
    return leaf is None or isinstance(leaf, tl.constexpr)

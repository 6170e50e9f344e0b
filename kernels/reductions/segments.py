"""Sequences of rows: what the forward and the backward of the segment reductions share.

The first dimension is the outer group, whatever lies nearest in memory. The other dimensions are the inner group, in
their own order. Operands with one row per sequence are indexed by the sequence in place of the row.
"""

from ..engine.indexing import Group, broadcast_strides, fuse, needs_int64, tile_kinds


def groups_of_rows(tensors, shape, sequences, which):
    """Returns (outer group, inner group, kinds, VEC, True if indices need 64 bits). which: the indices of the operands
    that have one row per sequence."""
    of_sequences = (sequences, *shape[1:])
    strides = [
        None if t is None else broadcast_strides(t, of_sequences if i in which else shape)
        for i, t in enumerate(tensors)
    ]
    outer = Group(shape[:1], tuple(s and s[:1] for s in strides))
    inner = fuse([d for d in range(1, len(shape)) if shape[d] != 1], shape, strides)
    kinds, vec = tile_kinds(tensors, outer, inner)
    longest = Group((max(shape[0], sequences),), outer.strides)
    return outer, inner, kinds, vec, needs_int64(longest, inner, longest.numel * inner.numel)


def check_vectors(name, **vectors):
    """Memory safety: the kernels read bounds, ids and order without strides."""
    for key, x in vectors.items():
        if x is not None and not (x.dim() == 1 and x.is_contiguous()):
            raise ValueError(f"{name}: {key} must be a contiguous vector, got {tuple(x.shape)} of strides {x.stride()}")

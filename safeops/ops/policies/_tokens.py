"""Shared by the family: the tokens of sequences, padded (..., T) or packed (T,) with cu_seqlens (S + 1,)."""

import torch

from safeops.core import check, sums
from safeops.core.composed_loss import same_shape
from safeops.ops.reductions._segment import INDICES, _refuse_bounds, sequence_of_rows
from safeops.ops.reductions.segment_mean import _segment_mean
from safeops.ops.reductions.segment_sum import _segment_sum
from safeops.ops.selection.safe_index_select import _safe_index_select

PARTS = _segment_mean, _segment_sum, _safe_index_select, *sums.ALL


def validate(name, first, cu_seqlens=None, *, mask=None, **operands):
    """Check that all operands have the shape of `first`, (name, tensor): a number for each token."""
    key, like = first
    if not same_shape(name, **{key: like}, **{other: x for other, x in operands.items() if x is not None}):
        raise ValueError(f"{name}: {key} must have tokens along its last dim, got shape ()")
    check.mask(name, mask, key, like)
    check.same_device(name, key, like, mask=mask, **operands)
    if cu_seqlens is not None:
        _validate_bounds(name, key, like, cu_seqlens)


def _validate_bounds(name, key, like, cu_seqlens):
    check.tensor(name, "cu_seqlens", cu_seqlens)
    for other, x in ((key, like), ("cu_seqlens", cu_seqlens)):
        check.no_dtensor(name, other, x)  # a packed batch belongs to one rank
    if cu_seqlens.dtype not in INDICES:
        raise TypeError(f"{name}: cu_seqlens must be int64 or int32, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"{name}: cu_seqlens must have one dim of S + 1 bounds, got {check.shown(cu_seqlens)}")
    if like.dim() != 1:
        raise ValueError(f"{name}: {key} of packed sequences must be (T,), got {check.shown(like)}")
    check.same_device(name, key, like, cu_seqlens=cu_seqlens)
    _refuse_bounds(name, cu_seqlens, like.shape[0], check.shown(like))


def sequences(like, cu_seqlens):
    """The shape of what has one number for each sequence."""
    return like.shape[:-1] if cu_seqlens is None else torch.Size([cu_seqlens.shape[0] - 1])


def mean(x, keep, cu_seqlens, weight=None):
    """The mean of each sequence; 0 if nothing of it is kept."""
    if cu_seqlens is None:
        return sums.mean(x, keep, -1, weight=weight)
    return _segment_mean.call(x, cu_seqlens, None, None, keep, weight, "zero")


def exists(like, keep, cu_seqlens):
    """Bool: True for the sequences that keep a token."""
    ones = torch.ones_like(like)
    if cu_seqlens is None:
        return sums.count(ones, keep, -1) > 0
    return _segment_sum.call(ones, cu_seqlens, None, None, keep, None, "zero") > 0


def spread(of_sequences, like, cu_seqlens):
    """A number of each sequence, for each of its tokens."""
    if cu_seqlens is None:
        return of_sequences.unsqueeze(-1).expand(like.shape)
    return _safe_index_select.call(of_sequences, 0, sequence_of_rows(cu_seqlens, None, like.shape[0]), 0)


# The line on cu_seqlens in docstrings of the family.
SEQUENCES = """\
        cu_seqlens: (S + 1,) int32 or int64, for packed sequences: tokens are (T,), and sequence s has those from
            cu_seqlens[s] up to cu_seqlens[s + 1]. None: the last dim is one sequence, padded.
"""

"""A row's target distribution, given by log probabilities of its best classes; all others are merged into one class."""

import torch

from safeops.core import check
from safeops.core.definitions import gathered
from safeops.core.dtypes import compute_dtype
from safeops.ops.classification._classification import refuse_missing_class
from safeops.ops.classification._logits import shaped
from safeops.ops.reductions.masked_logsumexp import masked_logsumexp

INDICES = (torch.int64, torch.int32)


def validate_best(name, input, values, indices):
    check.floating(name, "target_values", values)
    check.tensor(name, "target_indices", indices)
    if indices.dtype not in INDICES:
        raise TypeError(f"{name}: target_indices must be int64 or int32, got {indices.dtype}")
    if values.dim() != input.dim() or values.shape[:-1] != input.shape[:-1] or values.shape[-1] > input.shape[-1]:
        raise ValueError(
            f"{name}: target_values {check.shown(values)} must have, for each row of input {check.shown(input)}, some "
            f"of its {input.shape[-1]} classes along the last dim"
        )
    if indices.shape != values.shape:
        raise ValueError(
            f"{name}: target_indices {check.shown(indices)} must have the shape of target_values {check.shown(values)}"
        )


def refuse_missing(name, indices, keep, input):
    mask = None if keep is None else keep.unsqueeze(-1)
    refuse_missing_class(name, indices, mask, None, input.shape[-1], "input", input.shape, key="target_indices")


def buckets(input, values, indices, keep, temperature):
    """Merge the classes that are not given into one. Returns (logits of input over the temperature, log probabilities
    of the target), both (..., K + 1): the K given classes, then all others."""
    compute, classes, indices = compute_dtype(input.dtype, values.dtype), input.shape[-1], indices.long()
    exists = (indices >= 0) & (indices < classes)
    if keep is not None:  # select before arithmetic: NaN * 0 is NaN
        exists = exists & keep.unsqueeze(-1)
        values = torch.where(keep.unsqueeze(-1), values, 0)
    input = gathered(input, [input.dim() - 1])
    own = input.gather(-1, torch.where(exists, indices, 0)).to(compute)
    own = torch.where(exists, shaped(own, temperature, 0), float("-inf"))
    # (an index out of range is written to column `classes`, which is cut off)
    is_other = exists.new_ones((*input.shape[:-1], classes + 1))
    is_other = is_other.scatter(-1, torch.where(exists, indices, classes), False)[..., :classes]
    if keep is not None:
        is_other = is_other & keep.unsqueeze(-1)
    others = masked_logsumexp(shaped(input, temperature, 0, compute), is_other, -1, keepdim=True, dtype=compute)
    has_others = is_other.any(-1, keepdim=True)
    others = torch.where(has_others, others, float("-inf"))
    values = torch.where(exists, values.to(compute), float("-inf"))
    # (Rounded probabilities may add up to more than 1. The merged class gets eps at least, so that its log is finite.)
    known = masked_logsumexp(values, exists, -1, keepdim=True)
    rest = (-torch.expm1(known)).clamp(min=torch.finfo(compute).eps).log()
    rest = torch.where(has_others, rest, float("-inf"))
    return torch.cat([own, others], -1), torch.cat([values, rest], -1)

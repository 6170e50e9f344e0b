"""A row's target distribution, given by log probabilities of its best classes, and the logits to compare it with.

p_k, k = 1..K: the target's probabilities; c_k: their classes; q: the softmax of all logits of the row.

(1) tail="bucket": all other classes are merged into one: (p_1, ..., p_K, 1 - sum p_k) and (q_{c_1}, ..., q_{c_K}, the
    sum of q over all others).
(2) tail="renormalize": both are divided by their sums over the K classes: p_k / sum p and q_{c_k} / sum q.

A divergence takes the softmax of its operands, and is so given their logarithms, up to a constant of the row.
"""

import torch

from safeops.core import check
from safeops.core.definitions import gathered
from safeops.core.dtypes import compute_dtype
from safeops.ops.classification._classification import refuse_missing_class
from safeops.ops.classification._logits import shaped
from safeops.ops.classification._support import is_any
from safeops.ops.reductions.masked_logsumexp import masked_logsumexp

INDICES = (torch.int64, torch.int32)
TAILS = BUCKET, RENORMALIZE = ("bucket", "renormalize")
INF = float("inf")

# ---- checks


def validate_form(name, target, values, indices, tail):
    """Raise unless there is either a target, or the values and indices of its best classes."""
    check.choice(name, "tail", tail, TAILS)
    if target is not None and not (values is None and indices is None):
        raise TypeError(f"{name}: give target, or target_values and target_indices, not both")
    if any((x is None) is (target is None) for x in (values, indices)):
        raise TypeError(f"{name}: needs target, or target_values and target_indices in its place")
    if target is not None and tail != BUCKET:
        raise TypeError(f"{name}: tail={tail!r} needs target_values and target_indices")


def validate_best(name, input, values, indices, classes, owner):
    """owner: the name of the operand that has the classes. input: (..., any), an operand with the same rows."""
    check.floating(name, "target_values", values)
    check.tensor(name, "target_indices", indices)
    if indices.dtype not in INDICES:
        raise TypeError(f"{name}: target_indices must be int64 or int32, got {indices.dtype}")
    if values.dim() != input.dim() or values.shape[:-1] != input.shape[:-1] or values.shape[-1] > classes:
        raise ValueError(
            f"{name}: target_values {check.shown(values)} must have, for each row of input {check.shown(input)}, some "
            f"of {owner}'s {classes} classes along the last dim"
        )
    if indices.shape != values.shape:
        raise ValueError(
            f"{name}: target_indices {check.shown(indices)} must have the shape of target_values {check.shown(values)}"
        )


def listed(name, values, indices, keep, classes, owner, shape):
    """The indices, -1 where a value is -inf: such an entry is no class. Where the host may look, an index of a kept row
    that is out of range, or there twice, raises."""
    is_class = values.detach() != -INF
    mask = is_class if keep is None else is_class & keep.unsqueeze(-1)
    refuse_missing_class(name, indices, mask, None, classes, owner, shape, key="target_indices")
    if check.may_look(indices) and check.may_look(mask):
        ordered = torch.where(mask, indices, -1).sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if is_any(twice):
            first = ordered[..., 1:][twice][0].item()
            raise ValueError(f"{name}: target_indices has class {first} twice in a row: each class may be there once")
    return torch.where(is_class, indices, -1)


# ---- the two distributions, (..., K + 1) for a bucket, else (..., K)


def existing(indices, keep, classes):
    """Bool (..., K): the indices that count."""
    exists = (indices >= 0) & (indices < classes)
    return exists if keep is None else exists & keep.unsqueeze(-1)


def of_teacher(values, indices, exists, classes, tail, compute):
    """The target's log probabilities."""
    values = torch.where(exists, values.to(compute), absent(exists, tail))  # select before arithmetic: NaN * 0 is NaN
    if tail == RENORMALIZE:
        return values
    # (Rounded probabilities may add up to more than 1. The bucket gets eps at least, so that its log is finite.)
    known = masked_logsumexp(values, exists, -1, keepdim=True)
    rest = (-torch.expm1(known)).clamp(min=torch.finfo(compute).eps).log()
    if values.shape[-1] == classes:  # (else K classes are not all)
        ordered = torch.where(exists, indices, -1).sort(-1).values
        every = (ordered == torch.arange(classes, device=ordered.device)).all(-1, keepdim=True)
        rest = torch.where(every, -INF, rest)
    return torch.cat([values, rest], -1)


def of_student(input, indices, keep, temperature, tail, compute):
    """The logits over the temperature, of rows of logits."""
    input = gathered(input, [input.dim() - 1])
    classes, indices = input.shape[-1], indices.long()
    exists = existing(indices, keep, classes)
    own = input.gather(-1, torch.where(exists, indices, 0)).to(compute)
    own = torch.where(exists, shaped(own, temperature, 0), absent(exists, tail))
    if tail == RENORMALIZE:
        return own
    # (an index out of range is written to column `classes`, which is cut off)
    is_other = exists.new_ones((*input.shape[:-1], classes + 1))
    is_other = is_other.scatter(-1, torch.where(exists, indices, classes), False)[..., :classes]
    if keep is not None:  # select before arithmetic: NaN * 0 is NaN
        is_other = is_other & keep.unsqueeze(-1)
    others = masked_logsumexp(shaped(input, temperature, 0, compute), is_other, -1, keepdim=True, dtype=compute)
    return torch.cat([own, torch.where(is_other.any(-1, keepdim=True), others, -INF)], -1)


def absent(exists, tail):
    """The logarithm for an index that does not count. In a row without any, all are 0: both distributions are uniform,
    and their divergence is 0."""
    if tail == BUCKET:
        return -INF
    return torch.where(exists.any(-1, keepdim=True), -INF, 0.0)


def distributions(input, values, indices, keep, temperature, tail):
    """Returns (logits of rows of logits over the temperature, log probabilities of the target)."""
    compute, classes = compute_dtype(input.dtype, values.dtype), input.shape[-1]
    teacher = of_teacher(values, indices, existing(indices, keep, classes), classes, tail, compute)
    return of_student(input, indices, keep, temperature, tail, compute), teacher


ARGUMENTS = """\
        target_values: (..., K) floating tensor, in place of `target`: log probabilities of K classes, at this
            temperature, `(logits / temperature).log_softmax(-1)` at the classes. An entry of -inf is no class, whatever
            its index is: so lists of different lengths are padded.
        target_indices: (..., K) int64 or int32 tensor: the classes that the values belong to, no class twice (on the
            CPU that raises ValueError).
        tail: what becomes of all other classes. "bucket": they count as one, with the remaining probability, at least
            1e-7 (2e-16 in fp64). "renormalize": they do not count: both distributions are divided by their sums over
            the K classes, p_k / sum p and q_k / sum q, with q_k the softmax of all logits at the k-th class.
"""

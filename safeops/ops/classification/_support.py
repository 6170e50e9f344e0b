"""The support of a row: the classes that a sampler's top-p or top-k kept. All others do not exist.

    log p_c = x_c - log sum_{s in S} exp x_s   for c in S, else -inf

With a bool support the logits of the other classes are replaced by -inf, in a copy that the op reads in place of the
logits. So it is with the sampler's logits and a threshold: they are compared first. `_entries.py` has the CSR form.
"""

import math

import torch

from safeops.core import check
from safeops.core.dtypes import FLOATING
from safeops.ops.elementwise.masked_fill import masked_fill

INF, OUTSIDE, INTEGERS = float("inf"), ("-inf", "mask"), (torch.int64, torch.int32)

SUPPORT = """\
        support: the classes that exist for each row: a bool tensor of the logits' shape; a pair (offsets, classes) of
            integer tensors (CSR): `classes[offsets[i] : offsets[i + 1]]` are those of row i, in any order, with rows
            counted as they lie in a flattened tensor of their shape (offsets begin at 0 and end at the number of
            classes; on the CPU others raise ValueError); or, with `support_threshold`, the sampler's
            logits, floating, of the logits' shape. Probabilities are renormalised over them: the other logits, whatever
            they hold, change nothing, and their gradient is 0. On the CPU, a kept row without a class, with a class
            twice or with one out of range raises ValueError; elsewhere, and in compiled code, such a row is masked out.
        support_threshold: floating tensor of the rows' shape. A class exists where the sampler's logit in `support` is
            at least its row's threshold (so NaN does not).
"""
ARGUMENTS = (
    SUPPORT
    + """\
        outside: for a kept row whose target is not in its support: "-inf": its log_prob; "mask": it is masked out.
"""
)


def validate(name, support, threshold, shape, dim=-1, **of):
    """Check the support of logits of a shape, with the classes along `dim`. Returns it as a bool tensor of that shape,
    or as the pair of a CSR form; None if there is none.

    of: the tensors that the logits are or come from, by their names in errors."""
    if support is None:
        if threshold is not None:
            raise TypeError(f"{name}: support_threshold needs support, the sampler's logits")
        return None
    of = {key: x for key, x in of.items() if x is not None}
    for key, x in of.items():
        check.no_dtensor(name, key, x)
    if not isinstance(support, (torch.Tensor, list, tuple)):
        raise TypeError(f"{name}: support must be a tensor or a pair of tensors, got {type(support).__name__}")
    parts = (support,) if isinstance(support, torch.Tensor) else tuple(support)
    if len(parts) not in (1, 2):
        raise TypeError(f"{name}: support must be a tensor or a pair (offsets, classes), got {len(parts)} parts")
    keys = ("support",) if len(parts) == 1 else ("support's offsets", "support's classes")
    tensors = dict(zip(keys, parts))
    if threshold is not None:
        check.floating(name, "support_threshold", threshold)
        tensors["support_threshold"] = threshold
    for key, x in tensors.items():
        check.tensor(name, key, x)
        check.no_dtensor(name, key, x)
    first, reference = next(iter(of.items()))
    check.same_device(name, first, reference, **tensors)
    rows = tuple(n for d, n in enumerate(shape) if d != dim % len(shape))
    if threshold is not None and (len(parts) == 2 or parts[0].dtype not in FLOATING):
        got = "a pair" if len(parts) == 2 else parts[0].dtype
        raise TypeError(f"{name}: support_threshold needs a floating support, the sampler's logits, got {got}")
    if len(parts) == 1:
        (x,) = parts
        if threshold is None and x.dtype != torch.bool:
            raise TypeError(
                f"{name}: support must be bool, a pair (offsets, classes), or floating with support_threshold, got "
                f"{x.dtype}"
            )
        if tuple(x.shape) != tuple(shape):
            shown = " and ".join(f"{key} {check.shown(t)}" for key, t in of.items())
            raise ValueError(f"{name}: support {check.shown(x)} must have the rows and classes of {shown}")
        if threshold is None:
            return x
        if tuple(threshold.shape) != rows:
            raise ValueError(
                f"{name}: support_threshold {check.shown(threshold)} must have a number for each of the rows {rows}"
            )
        return x >= threshold.unsqueeze(dim)
    for key, x in zip(keys, parts):
        if x.dtype not in INTEGERS or x.dim() != 1:
            raise TypeError(f"{name}: {key} must be 1-dim, int64 or int32, got {x.dtype} {check.shown(x)}")
    if parts[0].shape[0] != math.prod(rows) + 1:
        raise ValueError(
            f"{name}: support's offsets {check.shown(parts[0])} must have one more element than there are rows, {rows}"
        )
    offsets, classes = parts
    last = classes.shape[0]
    if check.may_look(offsets) and is_any(torch.stack([offsets[0] != 0, offsets[-1] != last])):
        raise ValueError(
            f"{name}: support's offsets must begin at 0 and end at the number of its classes, {last}, got "
            f"{offsets[0].item()} and {offsets[-1].item()}"
        )
    return parts


def validate_outside(name, support, outside):
    check.choice(name, "outside", outside, OUTSIDE)
    if support is None and outside != OUTSIDE[0]:
        raise TypeError(f"{name}: outside={outside!r} needs support")


def refuse_rows(name, right, keep, classes, listed):
    """Raise if a kept row has no support. listed(row): its classes, as text. Only where the host may read values."""
    if check.may_look(keep) and check.may_look(right) and is_any(keep & ~right):
        row = (keep & ~right).flatten().nonzero()[0].item()
        raise ValueError(
            f"{name}: support of row {row} has {listed(row)}: each kept row needs classes in [0, {classes}), none of "
            "them twice"
        )


def is_any(wrong):
    """True if an element of a bool tensor is True. torch.gather checks its indices: Python reads no value."""
    try:
        torch.zeros(1).gather(0, wrong.reshape(-1).long())
    except (RuntimeError, IndexError):
        return True
    return False


def kept_rows(target, mask, ignore_index, classes):
    """Bool: the rows that the mask and the target keep; and the class of each, 0 where it is not kept."""
    index = target.long()
    keep = (index != ignore_index) & (index >= 0) & (index < classes)
    keep = keep if mask is None else keep & mask
    return keep, torch.where(keep, index, 0)


def with_classes(name, support, keep, dim=-1):
    """`keep` without the rows whose bool support has no class; they raise where the host may look."""
    right = has_classes(support, dim)
    refuse_rows(name, right, keep, support.shape[dim], lambda row: "no class")
    return keep & right


def has_classes(support, dim):
    """Bool: the rows of a bool support that have a class."""
    if not support.shape[dim] or not check.may_look(support):  # (Inductor reads bools that are viewed as bytes wrong)
        return support.any(dim)
    return support.view(torch.uint8).amax(dim) > 0  # (on the CPU, aten's any() of bools takes ten times as long)


def of_rows(name, support, outside, target, mask, ignore_index, dim=-1):
    """Returns (the mask of the rows to compute, how many kept rows have a target outside of their support).
    support: bool, of the logits' shape."""
    keep, index = kept_rows(target, mask, ignore_index, support.shape[dim])
    keep = with_classes(name, support, keep, dim)
    inside = support.gather(dim, index.unsqueeze(dim)).squeeze(dim) if support.shape[dim] else keep
    return keep & inside if outside == "mask" else keep, (keep & ~inside).sum()


def restrict(logits, support):
    """The logits, with -inf at classes that do not exist."""
    return masked_fill(logits, ~support, -INF)
